"""Planning: which tensors to group and compress, and how much; pure functions.

What lives here: what decides for running jobs, from their profiles (`auto*`, `live*`, `course`, `advice`, `families`,
DC2's controllers), and the published searches over traces (Espresso, MergeComp, L-GreCo) with the baselines they are
compared with. What may not: I/O, clocks, and any knowledge of `core` or `runtime`; a plan is a value that others carry
out.
"""

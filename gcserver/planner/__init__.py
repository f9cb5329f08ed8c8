"""Planning: which tensors to group and compress, and how much; pure functions over traces.

What lives here: Espresso, MergeComp, L-GreCo, DC2 and the baselines they are compared with. What
may not: I/O, clocks, and any knowledge of `core` or `runtime`; a plan is a value that others carry
out.
"""

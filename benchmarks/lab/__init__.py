"""A small cluster on one machine: namespaces joined by shaped links, and real daemons on them.

What lives here: what demo, benchmarks, soak and system tests need to stand several nodes up and, above all, to take
them down again. What may not: anything of the protocol, or measurements.
"""

"""Everything with I/O: supervisor, lane processes, transports, shared memory, pinning, rendezvous.

What lives here: code that turns sockets, memory files, clocks and kernels into `core` events and
carries `core` effects out. What may not: decisions of the protocol; those belong to `core`, where
they can be simulated.
"""

"""gcclient: the torch side, a thin library that hands gradients to the daemon and takes back the average.

What lives here: the session, the arena as the worker sees it, the DDP hook and what torch users call.
What may not: any import of `gcserver` and its dependencies; nobody wants those in a training environment.
"""

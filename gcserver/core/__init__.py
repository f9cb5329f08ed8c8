"""The protocol, pure: events and the current time in, a list of effects out.

What lives here: the lane machine (`lane.py`) and the control machine (`control.py`), and the small
concepts they are built from; docs/architecture.md lists the files. What may not: sockets, threads,
clocks, random numbers, files, numpy or torch. The same events in the same order give the same effects,
always; the simulation rests on that.
"""

"""gcserver: the daemon, one per machine, that compresses, exchanges and averages gradients.

What lives here: the protocol (`core`), the compression methods (`codecs`), the planner (`planner`),
everything with I/O (`runtime`) and the operator's side (`admin`). What may not: torch, and any
import of `gcclient`; a training process and its daemon share only `gcproto`.
"""

__version__ = "0.1.0"

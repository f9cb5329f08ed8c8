"""gcproto: the contract, everything that crosses a process boundary.

What lives here: frame headers and their validation, codec layouts, the admin service's messages and
the code generated from them. What may not: sockets, threads, torch, and any import of `gcserver` or
`gcclient`; both of them import this package, so it must stay cheap to import in a training process.
The folder is `proto/`; it is imported as `gcproto` because a top-level package called `proto` would
collide with proto-plus.
"""

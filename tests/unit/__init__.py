"""One module at a time, no processes, no sockets: each file mirrors one source file."""

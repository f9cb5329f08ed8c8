"""The operator's side: the gRPC service, its command line `gcctl`, the metrics and the dashboard.

What lives here: translation between `gcproto.admin_pb2` messages and what the supervisor knows or
can be asked to do. What may not: gradient bytes, and anything a lane would have to wait for.
"""

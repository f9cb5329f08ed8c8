"""Models that benchmarks train, in plain torch, with data that every machine can make without a download."""

#: Their names, as ``workloads`` has them (a test compares), for programs that do without torch.
MODELS = ("gpt", "cnn", "tiny", "demo", "gpt-adamw")

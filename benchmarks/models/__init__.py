"""Models that benchmarks train, in plain torch, with data that every machine can make without a download."""

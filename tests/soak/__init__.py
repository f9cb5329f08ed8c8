"""Long runs under load, each aggregate checked bit by bit; marked `soak`."""

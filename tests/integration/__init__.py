"""Real daemons and workers on loopback, without root."""

"""Properties over generated inputs (hypothesis): round trips, bounds, equivalence with an oracle."""

"""Unit tests of `gcserver/core`, a file per source file; how its parts play together is in `tests/simulation`."""

"""Programs a newcomer can run and copy from; `make demo` runs `examples.demo`."""

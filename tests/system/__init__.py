"""What needs root or system packages (network namespaces, foreign tools); marked `system`."""

"""What can be asked of a running agent: orders of the control socket, the live page, metrics."""

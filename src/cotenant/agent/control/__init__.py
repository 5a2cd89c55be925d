"""The agent's external interfaces: orders of the control socket, the live page, metrics."""

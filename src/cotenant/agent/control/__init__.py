"""The agent's external interfaces: the control socket, whose requests are called orders, the live page, and metrics."""

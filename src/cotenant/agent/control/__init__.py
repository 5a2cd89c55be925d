"""The agent's external interfaces: live web page, metrics, and the control socket, whose requests are called orders."""

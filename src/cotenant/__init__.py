"""Share and schedule GPUs among deep-learning tenants."""

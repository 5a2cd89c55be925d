"""Whether tenants have the share they were given, and who uses the agent's GPUs without having come to it."""

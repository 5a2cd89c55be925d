"""Messages between the agent, the shim in each tenant, and clients of the control socket."""

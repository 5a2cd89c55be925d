"""Messages between the agent, the shim in each tenant, and callers of the control socket."""

"""The training runtime: a controller, its job store, executors for local processes and for Ray, runners on nodes."""

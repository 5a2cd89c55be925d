"""The vocabulary shared by all packages: units, GPUs, clusters, work, plans, events."""

"""The vocabulary: units, GPUs, clusters, work, plans, events."""

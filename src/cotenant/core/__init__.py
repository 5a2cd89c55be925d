"""Types that all packages share: units, GPUs, clusters, work, plans, events."""

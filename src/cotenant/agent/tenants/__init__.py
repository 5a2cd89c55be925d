"""Tenants of a node: admission to GPUs, their processes and host memory, launching and stopping."""

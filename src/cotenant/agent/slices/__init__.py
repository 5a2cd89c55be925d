"""Shares by hardware time slices, which the agent sets on the channel groups of tenants' processes.

A channel group is the unit that the GPU gives time slices to; the driver creates at least one per CUDA context.
"""

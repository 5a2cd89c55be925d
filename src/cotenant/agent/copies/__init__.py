"""Scheduling of the tenants' copies between host and GPU: the tenants' queues share the PCIe link by weight."""

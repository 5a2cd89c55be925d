"""Memory limits that the kernel or the GPU's driver enforces on tenants' control groups, outside their processes."""

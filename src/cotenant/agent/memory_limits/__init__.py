"""Limits on tenants' memory that hold outside their processes: by the kernel or the driver, on control groups."""

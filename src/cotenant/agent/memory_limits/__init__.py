"""Memory limits of tenants enforced outside their processes: by kernel or driver, on control groups."""

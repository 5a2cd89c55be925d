"""Memory of tenants: accounting, host backing, swapping, parking."""

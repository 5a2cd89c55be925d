"""Memory of tenants: accounting, host backing, swap, parking."""

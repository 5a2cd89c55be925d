"""Memory of tenants: accounting, swapping to host memory between turns, and parking (eviction until resumed)."""

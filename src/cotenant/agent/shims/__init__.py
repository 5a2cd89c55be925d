"""Connections of the shims: processes bound to their tenants, their messages answered."""

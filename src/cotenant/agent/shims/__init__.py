"""Connections of the shims: assigns processes to their tenants and answers their messages."""

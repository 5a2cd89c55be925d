"""Shares by the hardware's time slices: the tenants' channel groups, the policy's orders carried out, the keeper."""

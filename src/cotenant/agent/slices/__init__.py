"""Shares by hardware time slices: the tenants' channel groups, execution of the policy's orders, the keeper."""

"""Partition policies: which MIG layout each GPU has and who gets which instance."""

"""Tenants that belong to a pod or a Slurm job."""

"""Orchestrators that own tenants: pods, Slurm jobs."""

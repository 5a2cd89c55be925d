"""Tenants owned by orchestrators: pods, Slurm jobs."""

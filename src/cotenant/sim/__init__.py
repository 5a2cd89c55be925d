"""Simulators of clusters and GPUs under the policies of this package; they run in virtual time."""

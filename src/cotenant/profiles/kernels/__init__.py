"""Profiles of single kernels, and what kernels of different processes cost each other."""

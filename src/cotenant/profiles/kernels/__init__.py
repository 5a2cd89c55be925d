"""Profiles of single kernels, and the slowdown that kernels of different processes cause each other."""

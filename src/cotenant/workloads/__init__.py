"""Workloads: readers of job and request traces, synthetic generators, and descriptions of clusters."""

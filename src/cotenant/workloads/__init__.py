"""Workloads: readers of job and request traces, generators of random traces, and descriptions of clusters."""

"""Readers of job and request traces, and synthetic generators."""

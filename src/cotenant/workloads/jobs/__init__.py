"""Traces of training jobs: one reader per format, filters, synthetic generators."""

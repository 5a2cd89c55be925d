"""Policies for training jobs: orderings, CPU/memory allotments, placements."""

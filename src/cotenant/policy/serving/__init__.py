"""Policies for inference services: plans of GPU pieces, batch dispatch, autoscaling."""

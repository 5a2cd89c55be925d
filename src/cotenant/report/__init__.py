"""Plots, HTML pages and explanations of recorded runs."""

"""Profiles of language models' engines: how long a step takes. Profile files, and the fit of a profile to measurements.
"""

"""Speeds on MIG slices: shipped table, predictor from MPS measurements."""

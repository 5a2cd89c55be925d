"""Serving plans: GPUs cut into gpulets, services packed on them under SLOs."""

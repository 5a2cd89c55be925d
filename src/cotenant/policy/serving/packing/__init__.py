"""Serving plans: divide GPUs into gpulets and assign services to them under SLOs."""

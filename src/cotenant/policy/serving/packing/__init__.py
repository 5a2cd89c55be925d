"""Serving plans: they divide GPUs into gpulets (parts of a GPU), and place services on them so that the SLOs are
kept."""

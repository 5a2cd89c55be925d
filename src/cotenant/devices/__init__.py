"""GPUs of this machine: NVIDIA devices (NVML, clocks, MIG, checkpoints) and the software GPU."""

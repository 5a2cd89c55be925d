"""GPUs of this machine: NVIDIA GPUs (NVML, clocks, MIG, checkpoints), and the software GPU, which simulates one."""

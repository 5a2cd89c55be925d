"""Python parts of the software GPU, which simulates a GPU on machines without one; its driver is in native/softgpu."""

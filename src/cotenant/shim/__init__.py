"""The CUDA driver shim: C sources, and the build that makes one library of them for every Python version."""

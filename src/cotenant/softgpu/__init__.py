"""The software GPU: a stand-in libcuda for machines without one, its build, and a small program that uses it."""

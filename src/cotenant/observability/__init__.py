"""The live page, its event stream and the Prometheus metrics of the agent, servers and the fleet's controller.

This package uses only the standard library.
"""

"""Checks that each tenant has its share, and detects processes that use the GPUs without being connected to the agent.
"""

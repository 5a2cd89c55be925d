"""Keeps the agent's tenants equal to the pods to which the kubelet has allocated devices."""

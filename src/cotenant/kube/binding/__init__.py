"""The agent's tenants kept equal to the pods that the kubelet has given devices to."""

"""The admission webhook: validates a pod's request and rewrites the pod; its certificates."""

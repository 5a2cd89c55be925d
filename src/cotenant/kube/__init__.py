"""Kubernetes: translates a pod's request for a share of a GPU into what the scheduler, the kubelet and the node's agent
each need.
"""

from cotenant.core.extras import require

require("kube", "cryptography", "grpc", "google.protobuf", "orjson")

"""Kubernetes: translates pods that request a share for the scheduler, the kubelet and the node's agent."""

from cotenant.core.extras import require

require("kube", "cryptography", "grpc", "google.protobuf", "orjson")

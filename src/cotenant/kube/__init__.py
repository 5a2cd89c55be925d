"""Kubernetes: pods that ask for a share, translated for the scheduler, the kubelet and the agent of the node."""

from cotenant.core.extras import require

require("kube", "cryptography", "grpc", "google.protobuf", "orjson")

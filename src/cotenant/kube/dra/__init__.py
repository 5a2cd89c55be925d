"""Dynamic resource allocation (DRA): offers the node's devices in ResourceSlices, derives and reads claims, and serves
the kubelet as the node's driver."""

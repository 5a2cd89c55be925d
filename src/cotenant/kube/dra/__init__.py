"""Dynamic resource allocation: devices of ResourceSlices, claims, the node's driver."""

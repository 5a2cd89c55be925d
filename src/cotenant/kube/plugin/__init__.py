"""The device plugin: resources of a node, registered with the kubelet."""

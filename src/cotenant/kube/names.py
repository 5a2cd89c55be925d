"""All names that Cotenant uses in a cluster: annotations, resources, paths."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from cotenant.devices import nvidia

DOMAIN = "cotenant.dev"

REQUEST = f"{DOMAIN}/request"
LIMIT = f"{DOMAIN}/limit"
MEMORY = f"{DOMAIN}/memory"
# the weakest enforcement of the memory limit that the pod accepts: a value of core.strength.Strength, such as `driver`
# (enforcement by NVIDIA's kernel driver)
ENFORCE_MEMORY = f"{DOMAIN}/enforce-memory"
CONTAINERS = f"{DOMAIN}/containers"
INJECT = f"{DOMAIN}/inject"
# how a pod is placed: by units (extended resources that the scheduler counts) or by claims (dynamic resource
# allocation)
PLACED_BY = f"{DOMAIN}/placed-by"
ANNOTATIONS = (REQUEST, LIMIT, MEMORY, ENFORCE_MEMORY, CONTAINERS, INJECT, PLACED_BY)
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

SHARE_RESOURCE = f"{DOMAIN}/share"  # one unit is 1 % of the time of one GPU
MEMORY_RESOURCE = f"{DOMAIN}/memory"  # one unit is 1 GiB of the memory of one GPU
GPU_RESOURCE = f"{DOMAIN}/gpu"  # one unit is one whole GPU
MIG_PREFIX = f"{DOMAIN}/mig-"  # cotenant.dev/mig-1g.10gb
RESOURCES = (SHARE_RESOURCE, MEMORY_RESOURCE, GPU_RESOURCE)
MIG_RESOURCE = re.compile(rf"^{re.escape(MIG_PREFIX)}[1-7]g\.[0-9]+gb(?:\.me)?\Z")
SHARE_UNITS = 100
MEMORY_UNIT_BYTES = 1 << 30

SKIPPED_NAMESPACES = ("kube-system", "kube-public", "kube-node-lease")

# paths on the node
HOST_LIBRARIES = PurePosixPath("/var/lib/cotenant/lib")
HOST_SOCKETS = PurePosixPath("/run/cotenant/tenants")
HOST_AGENT = PurePosixPath("/run/cotenant/agent")
DEVICE_PLUGINS = PurePosixPath("/var/lib/kubelet/device-plugins")
POD_RESOURCES = PurePosixPath("/var/lib/kubelet/pod-resources")
KUBELET_PLUGINS = PurePosixPath("/var/lib/kubelet/plugins")
PLUGINS_REGISTRY = PurePosixPath("/var/lib/kubelet/plugins_registry")
# paths inside a container
LIBRARIES = PurePosixPath("/opt/cotenant/lib")
SOCKETS = PurePosixPath("/opt/cotenant/run")
SOCKET_FILE = "agent.sock"
CURRENT = "current"  # symbolic link to the newest build of the shim
LIBRARY_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib")
DRIVER_FILE = nvidia.DRIVER
NVML_REAL_FILE = nvidia.NVML

# names of objects in the cluster
NAMESPACE = "cotenant-system"
NAME = "cotenant"


def in_domain(key: str) -> bool:
    """Whether a key is in Cotenant's domain or a subdomain."""
    host = key.partition("/")[0]
    return "/" in key and (host == DOMAIN or host.endswith(f".{DOMAIN}"))

"""The names, units and labels of live metrics: the one list that exposition, dashboards, alerts and documents refer to.

Names follow Prometheus's conventions: a base unit at the end (`_seconds`, `_bytes`, `_ratio` for fractions 0..1),
`_total` for counters. Labels are bounded: tenants, services and GPUs that exist now, never users or requests.
"""

from __future__ import annotations

from cotenant.observability import metrics_kube, metrics_llm
from cotenant.observability.metric import Metric

TURN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

GPU_INFO = Metric("cotenant_gpu_info", "gauge", "1 for each GPU of this agent.", ("gpu", "index", "model"))
GPU_MEMORY = Metric("cotenant_gpu_memory_bytes", "gauge", "Memory of the GPU.", ("gpu",))
GPU_CHARGED = Metric("cotenant_gpu_memory_charged_bytes", "gauge", "Memory charged to all tenants.", ("gpu",))
GPU_PROMISED = Metric("cotenant_gpu_promised_ratio", "gauge", "Sum of the requests of the GPU's tenants.", ("gpu",))
GPU_UNSEEN = Metric(
    "cotenant_gpu_unseen_processes", "gauge", "Processes that use the GPU past the agent.", ("gpu", "whose")
)
AGENT_START = Metric("cotenant_agent_start_time_seconds", "gauge", "When the agent started, unix time.")
AGENT_TENANTS = Metric("cotenant_agent_tenants", "gauge", "Tenants of this agent.")
AGENT_UNLISTED = Metric(
    "cotenant_agent_tenants_unlisted", "gauge", "Tenants beyond the most that are exported one by one."
)
AGENT_PROCESSES = Metric("cotenant_agent_processes", "gauge", "Connected processes of tenants.")
AGENT_REFUSED = Metric("cotenant_agent_refused_connections_total", "counter", "Connections that were turned away.")
AGENT_TURNS = Metric("cotenant_agent_turns_total", "counter", "Turns that have ended.", ("gpu",))
AGENT_CONFIG_FAULT = Metric(
    "cotenant_agent_config_fault", "gauge", "1 while the configuration file cannot be used and the last good one holds."
)
TURN_SECONDS = Metric("cotenant_turn_seconds", "histogram", "How long turns were held.", ("gpu",), TURN_BUCKETS_S)
TURN_WAIT = Metric(
    "cotenant_turn_wait_seconds", "histogram", "How long a turn was waited for.", ("gpu",), TURN_BUCKETS_S
)
TENANT_REQUEST = Metric("cotenant_tenant_request_ratio", "gauge", "Share that the tenant was promised.", ("tenant",))
TENANT_LIMIT = Metric("cotenant_tenant_limit_ratio", "gauge", "Share that it never exceeds.", ("tenant",))
TENANT_SHARE = Metric(
    "cotenant_tenant_share_ratio", "gauge", "GPU time it got over the last window.", ("tenant", "gpu")
)
TENANT_SHORT = Metric(
    "cotenant_tenant_share_short_seconds", "gauge",
    "For how long it has had less than its request while it wanted the GPU; 0 while it has not.", ("tenant", "gpu"),
)  # fmt: skip
TENANT_MEMORY = Metric("cotenant_tenant_memory_bytes", "gauge", "GPU memory charged to it.", ("tenant", "gpu"))
TENANT_MEMORY_LIMIT = Metric(
    "cotenant_tenant_memory_limit_bytes", "gauge", "Its memory cap, where it has one.", ("tenant",)
)
TENANT_HOST = Metric("cotenant_tenant_host_pinned_bytes", "gauge", "Host memory it has pinned.", ("tenant",))
TENANT_HELD = Metric("cotenant_tenant_held_seconds_total", "counter", "GPU time of its turns.", ("tenant", "gpu"))
TENANT_WAIT = Metric("cotenant_tenant_wait_seconds_total", "counter", "Time it waited for turns.", ("tenant", "gpu"))
TENANT_OVERRUN = Metric(
    "cotenant_tenant_overrun_seconds_total", "counter", "Time its turns lasted beyond their end.", ("tenant", "gpu")
)
TENANT_TURNS = Metric("cotenant_tenant_turns_total", "counter", "Its turns.", ("tenant", "gpu"))
TENANT_LAUNCHES = Metric(
    "cotenant_tenant_launches_total", "counter", "Its launches of kernels and graphs.", ("tenant",)
)
TENANT_LAUNCH_WAIT = Metric(
    "cotenant_tenant_launch_wait_seconds_total", "counter",
    "Time that its launches waited in the host, for turns or for latency-sensitive work to end.", ("tenant",),
)  # fmt: skip
TENANT_WARNINGS = Metric("cotenant_tenant_warnings_total", "counter", "Warnings about it.", ("tenant",))
TENANT_NOT_ENFORCED = Metric(
    "cotenant_tenant_share_not_enforced", "gauge", "1 while a process of it has more than its share.", ("tenant",)
)
SERVER_RECEIVED = Metric("cotenant_server_received_total", "counter", "Requests that have arrived.", ("service",))
SERVER_REQUESTS = Metric(
    "cotenant_server_requests_total", "counter",
    "Requests that have ended: ok, late, dropped, full, failed, cancelled.", ("service", "outcome"),
)  # fmt: skip
SERVER_SECONDS = Metric(
    "cotenant_server_request_seconds", "histogram", "From arrival to answer, of answered requests.", ("service",),
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)  # fmt: skip
SERVER_BATCH = Metric(
    "cotenant_server_batch_items", "histogram", "Items per batch.", ("service",), (1, 2, 4, 8, 16, 32, 64, 128)
)
SERVER_WAITING = Metric("cotenant_server_waiting", "gauge", "Requests in the queue.", ("service",))
SERVER_SLO = Metric("cotenant_server_slo_seconds", "gauge", "The service's SLO.", ("service",))
SERVER_RATE = Metric("cotenant_server_arrivals_per_second", "gauge", "Rate of arrivals, smoothed.", ("service",))
SERVER_CAPACITY = Metric(
    "cotenant_server_capacity_per_second", "gauge", "Requests per second that the plan can take.", ("service",)
)
SERVER_READY = Metric("cotenant_server_ready", "gauge", "1 while the service can answer.", ("service",))
SERVER_BUSY = Metric(
    "cotenant_server_gpulet_busy_seconds_total", "counter", "Time that a gpulet has run batches.", ("gpu", "gpulet")
)
SERVER_GPUS_USED = Metric("cotenant_server_gpus_in_use", "gauge", "GPUs that the plan uses.")
SERVER_GPUS_HELD = Metric("cotenant_server_gpus_held", "gauge", "GPUs that are held for the server.")
SERVER_OPEN = Metric("cotenant_server_in_flight", "gauge", "Requests in the server.")
SERVER_CONNECTIONS = Metric("cotenant_server_connections", "gauge", "Connections of clients.", ("door",))
SERVER_REFUSED = Metric(
    "cotenant_server_refused_connections_total", "counter", "Connections beyond the most that are taken.", ("door",)
)
SERVER_REPLANS = Metric("cotenant_server_replans_total", "counter", "Plans that were asked for.")
SERVER_SWITCHES = Metric("cotenant_server_switches_total", "counter", "Plans put in force.")
SERVER_LOADS = Metric("cotenant_server_model_loads_total", "counter", "Models loaded into workers.")
SERVER_DEATHS = Metric("cotenant_server_worker_deaths_total", "counter", "Workers that ended unasked.")
FLEET_JOBS = Metric("cotenant_fleet_jobs", "gauge", "Jobs that are not over, by state.", ("state",))
FLEET_ENDED = Metric("cotenant_fleet_jobs_ended_total", "counter", "Jobs that are over, by how they ended.", ("state",))
FLEET_GPUS = Metric("cotenant_fleet_gpus", "gauge", "GPUs of the node.", ("node",))
FLEET_HELD = Metric("cotenant_fleet_gpus_held", "gauge", "GPUs of the node that jobs hold.", ("node",))
FLEET_REACHABLE = Metric("cotenant_fleet_node_reachable", "gauge", "1 while the node answers.", ("node",))
FLEET_LONGEST_WAIT = Metric("cotenant_fleet_longest_wait_seconds", "gauge", "The longest wait of a job without GPUs.")
FLEET_WAIT = Metric(
    "cotenant_fleet_wait_seconds", "histogram", "From a job's arrival until its processes first ran.", (),
    (1, 5, 15, 60, 300, 900, 3600, 14400, 86400, 604800),
)  # fmt: skip
FLEET_ROUNDS = Metric("cotenant_fleet_rounds_total", "counter", "Decisions of the policy.")
FLEET_DECISION = Metric(
    "cotenant_fleet_decision_seconds", "histogram", "How long decisions took.", (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)  # fmt: skip
FLEET_FAULTS = Metric("cotenant_fleet_faults", "gauge", "Things that are wrong now: store, policy, nodes.")
FLEET_MEMORY = Metric("cotenant_fleet_peak_memory_bytes", "gauge", "Most memory that the controller has used.")


def _of(*owners: str) -> tuple[Metric, ...]:
    """The metrics above whose names begin with cotenant_OWNER_, in their order."""
    starts = tuple(f"cotenant_{owner}_" for owner in owners)
    return tuple(each for each in globals().values() if isinstance(each, Metric) and each.name.startswith(starts))


AGENT, SERVER, FLEET = _of("gpu", "agent", "turn", "tenant"), _of("server"), _of("fleet")


def every() -> tuple[Metric, ...]:
    """All live metrics, in the order of documents and dashboards."""
    return AGENT + SERVER + metrics_llm.MODEL + FLEET + metrics_kube.WEBHOOK + metrics_kube.PLUGIN

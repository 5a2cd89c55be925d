"""The only list of live metrics, with names, units and labels; dashboards, alerts and docs/metrics.md refer to it.

Names follow Prometheus's conventions: a base unit at the end (`_seconds`, `_bytes`, `_ratio` for fractions 0..1),
`_total` for counters. Labels are bounded: tenants, services and GPUs that exist now, never users or requests.
"""

from __future__ import annotations

from cotenant.observability.exposition import Metric

TURN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

GPU_INFO = Metric("cotenant_gpu_info", "gauge", "1 for each GPU of this agent.", ("gpu", "index", "model"))
GPU_MEMORY = Metric("cotenant_gpu_memory_bytes", "gauge", "Memory of the GPU.", ("gpu",))
GPU_CHARGED = Metric("cotenant_gpu_memory_charged_bytes", "gauge", "GPU memory charged to all tenants.", ("gpu",))
GPU_PROMISED = Metric(
    "cotenant_gpu_promised_ratio", "gauge", "Sum of the GPU time fractions guaranteed to its tenants.", ("gpu",)
)
GPU_UNSEEN = Metric(
    "cotenant_gpu_unseen_processes",
    "gauge",
    "Processes that use the GPU without being connected to the agent.",
    ("gpu", "whose"),
)
AGENT_START = Metric("cotenant_agent_start_time_seconds", "gauge", "Start time of the agent, unix time.")
AGENT_TENANTS = Metric("cotenant_agent_tenants", "gauge", "Tenants of this agent.")
AGENT_UNLISTED = Metric(
    "cotenant_agent_tenants_unlisted", "gauge", "Tenants without metrics of their own, because there are too many."
)
AGENT_PROCESSES = Metric("cotenant_agent_processes", "gauge", "Connected processes of tenants.")
AGENT_REFUSED = Metric("cotenant_agent_refused_connections_total", "counter", "Connections that the agent refused.")
AGENT_TURNS = Metric("cotenant_agent_turns_total", "counter", "Turns that have ended.", ("gpu",))
AGENT_CONFIG_FAULT = Metric(
    "cotenant_agent_config_fault",
    "gauge",
    "1 while the configuration file, or part of it, is not in effect.",
)
TURN_SECONDS = Metric("cotenant_turn_seconds", "histogram", "Duration of tenants' turns.", ("gpu",), TURN_BUCKETS_S)
TURN_WAIT = Metric(
    "cotenant_turn_wait_seconds",
    "histogram",
    "Time from a tenant's request for a turn to the start of the turn.",
    ("gpu",),
    TURN_BUCKETS_S,
)
AGENT_SWITCH_DELAY = Metric(
    "cotenant_agent_switch_delay_seconds",
    "histogram",
    "Delay of the agent when tenants under hardware time slices were to be stopped or resumed.",
    ("gpu",),
    TURN_BUCKETS_S,
)
TENANT_REQUEST = Metric(
    "cotenant_tenant_request_ratio", "gauge", "Fraction of GPU time guaranteed to the tenant (request).", ("tenant",)
)
TENANT_LIMIT = Metric(
    "cotenant_tenant_limit_ratio", "gauge", "Largest fraction of GPU time of the tenant (limit).", ("tenant",)
)
TENANT_SHARE = Metric(
    "cotenant_tenant_share_ratio", "gauge", "Fraction of the GPU's time that the tenant had in the last window.",
    ("tenant", "gpu"),
)
TENANT_SHORT = Metric(
    "cotenant_tenant_share_short_seconds", "gauge",
    "Time for which the tenant has had less than its request although it wanted the GPU; 0 if it gets "
    "its request.", ("tenant", "gpu"),
)  # fmt: skip
TENANT_MEMORY = Metric("cotenant_tenant_memory_bytes", "gauge", "GPU memory charged to the tenant.", ("tenant", "gpu"))
TENANT_MEMORY_LIMIT = Metric(
    "cotenant_tenant_memory_limit_bytes", "gauge", "GPU memory limit of the tenant, if it has one.", ("tenant",)
)
TENANT_HOST = Metric("cotenant_tenant_host_pinned_bytes", "gauge", "Host memory pinned by the tenant.", ("tenant",))
TENANT_HELD = Metric(
    "cotenant_tenant_held_seconds_total", "counter", "GPU time of the tenant's turns.", ("tenant", "gpu")
)
TENANT_WAIT = Metric(
    "cotenant_tenant_wait_seconds_total", "counter", "Time that the tenant waited for turns.", ("tenant", "gpu")
)
TENANT_OVERRUN = Metric(
    "cotenant_tenant_overrun_seconds_total",
    "counter",
    "Time by which the tenant's turns ended later than their deadlines.",
    ("tenant", "gpu"),
)
TENANT_TURNS = Metric("cotenant_tenant_turns_total", "counter", "Turns of the tenant.", ("tenant", "gpu"))
TENANT_LAUNCHES = Metric(
    "cotenant_tenant_launches_total", "counter", "Kernel and graph launches of the tenant.", ("tenant",)
)
TENANT_LAUNCH_WAIT = Metric(
    "cotenant_tenant_launch_wait_seconds_total", "counter",
    "Time that the tenant's launches waited on the host, for a turn or until latency-sensitive "
    "work ended.", ("tenant",),
)  # fmt: skip
TENANT_WARNINGS = Metric("cotenant_tenant_warnings_total", "counter", "Warnings about the tenant.", ("tenant",))
TENANT_NOT_ENFORCED = Metric(
    "cotenant_tenant_share_not_enforced",
    "gauge",
    "1 while a process of the tenant is not limited to its share.",
    ("tenant",),
)
SERVER_RECEIVED = Metric("cotenant_server_received_total", "counter", "Requests received.", ("service",))
SERVER_REQUESTS = Metric(
    "cotenant_server_requests_total", "counter",
    "Finished requests by outcome: ok, late, dropped, full, failed, cancelled.", ("service", "outcome"),
)  # fmt: skip
SERVER_SECONDS = Metric(
    "cotenant_server_request_seconds", "histogram", "Time from arrival to answer of answered requests.", ("service",),
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)  # fmt: skip
SERVER_BATCH = Metric(
    "cotenant_server_batch_items", "histogram", "Items per batch.", ("service",), (1, 2, 4, 8, 16, 32, 64, 128)
)
SERVER_WAITING = Metric("cotenant_server_waiting", "gauge", "Requests in the queue.", ("service",))
SERVER_SLO = Metric("cotenant_server_slo_seconds", "gauge", "Latency objective of the service.", ("service",))
SERVER_RATE = Metric("cotenant_server_arrivals_per_second", "gauge", "Rate of arrivals, smoothed.", ("service",))
SERVER_CAPACITY = Metric(
    "cotenant_server_capacity_per_second", "gauge", "Requests per second for which the plan provides.", ("service",)
)
SERVER_READY = Metric("cotenant_server_ready", "gauge", "1 while the service can answer.", ("service",))
SERVER_BUSY = Metric(
    "cotenant_server_gpulet_busy_seconds_total", "counter",
    "Time that a gpulet (a partition of a GPU) was running batches.", ("gpu", "gpulet"),
)
SERVER_GPUS_USED = Metric("cotenant_server_gpus_in_use", "gauge", "GPUs that the plan uses.")
SERVER_GPUS_HELD = Metric("cotenant_server_gpus_held", "gauge", "GPUs that the server holds.")
SERVER_OPEN = Metric("cotenant_server_in_flight", "gauge", "Requests in the server, queued or running.")
SERVER_CONNECTIONS = Metric("cotenant_server_connections", "gauge", "Client connections by endpoint.", ("door",))
SERVER_REFUSED = Metric(
    "cotenant_server_refused_connections_total",
    "counter",
    "Connections refused because the limit was reached, by endpoint.",
    ("door",),
)
SERVER_REPLANS = Metric("cotenant_server_replans_total", "counter", "Plans that were computed.")
SERVER_SWITCHES = Metric("cotenant_server_switches_total", "counter", "Plans that were put into effect.")
SERVER_LOADS = Metric("cotenant_server_model_loads_total", "counter", "Models loaded into workers.")
SERVER_DEATHS = Metric("cotenant_server_worker_deaths_total", "counter", "Workers that died unexpectedly.")
FLEET_JOBS = Metric("cotenant_fleet_jobs", "gauge", "Unfinished jobs by state.", ("state",))
FLEET_ENDED = Metric("cotenant_fleet_jobs_ended_total", "counter", "Finished jobs by state.", ("state",))
FLEET_GPUS = Metric("cotenant_fleet_gpus", "gauge", "GPUs of the node.", ("node",))
FLEET_HELD = Metric("cotenant_fleet_gpus_held", "gauge", "GPUs of the node that jobs hold.", ("node",))
FLEET_REACHABLE = Metric("cotenant_fleet_node_reachable", "gauge", "1 while the node responds.", ("node",))
FLEET_LONGEST_WAIT = Metric("cotenant_fleet_longest_wait_seconds", "gauge", "Longest current wait of a job for GPUs.")
FLEET_WAIT = Metric(
    "cotenant_fleet_wait_seconds", "histogram", "Time from a job's arrival until its processes first ran.", (),
    (1, 5, 15, 60, 300, 900, 3600, 14400, 86400, 604800),
)  # fmt: skip
FLEET_ROUNDS = Metric("cotenant_fleet_rounds_total", "counter", "Scheduling decisions of the policy.")
FLEET_DECISION = Metric(
    "cotenant_fleet_decision_seconds", "histogram", "Duration of scheduling decisions.", (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)  # fmt: skip
FLEET_FAULTS = Metric("cotenant_fleet_faults", "gauge", "Current faults by component: store, policy, nodes.")
FLEET_MEMORY = Metric("cotenant_fleet_peak_memory_bytes", "gauge", "Peak memory of the controller.")
MODEL_STATE = Metric(
    "cotenant_model_state", "gauge",
    "1 for the current state: cold, starting, resident, leaving, evicted, coming back.", ("model", "state"),
)  # fmt: skip
MODEL_WAITING = Metric("cotenant_model_waiting", "gauge", "Requests in the model's queue.", ("model",))
MODEL_OPEN = Metric("cotenant_model_open", "gauge", "Requests that the model's program is processing.", ("model",))
MODEL_REQUESTS = Metric(
    "cotenant_model_requests_total", "counter",
    "Finished requests by outcome: ok, error (of the program), client_error (the program answered 4xx), full, "
    "unavailable, failed, cancelled.",
    ("model", "outcome"),
)  # fmt: skip
MODEL_RETRIES = Metric(
    "cotenant_model_retries_total",
    "counter",
    "Requests sent to a program again after a first attempt failed.",
    ("model",),
)
MODEL_TTFT = Metric(
    "cotenant_model_first_token_seconds", "histogram", "Time from a streaming request to its first token.", ("model",),
    (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0),
)  # fmt: skip
MODEL_TPOT = Metric(
    "cotenant_model_token_seconds", "histogram", "Mean time between the tokens of a stream.", ("model",),
    (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)  # fmt: skip
MODEL_ANSWER = Metric(
    "cotenant_model_answer_seconds", "histogram",
    "Time from a request to its answer, of successful answers that are not streamed (these have no TTFT).", ("model",),
    (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0),
)  # fmt: skip
MODEL_TTFT_SLO = Metric("cotenant_model_first_token_slo_seconds", "gauge", "TTFT target of the model.", ("model",))
MODEL_TPOT_SLO = Metric("cotenant_model_token_slo_seconds", "gauge", "TPOT target of the model.", ("model",))
MODEL_SWITCHES = Metric(
    "cotenant_model_switches_total", "counter", "Number of starts, evictions, returns and stops of the model.",
    ("model", "kind"),
)  # fmt: skip
MODEL_SWITCH_SECONDS = Metric(
    "cotenant_model_switch_seconds_total",
    "counter",
    "Total duration of the model's starts, evictions, returns and stops.",
    ("model", "kind"),
)
MODEL_DEATHS = Metric("cotenant_model_program_deaths_total", "counter", "Programs that died unexpectedly.", ("model",))
MODEL_CONNECTIONS = Metric("cotenant_model_door_connections", "gauge", "Client connections to the models' endpoint.")
REVIEW_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)

REVIEWS = Metric("cotenant_webhook_reviews_total", "counter", "Admission reviews by outcome.", ("outcome",))
REVIEW_SECONDS = Metric(
    "cotenant_webhook_review_seconds",
    "histogram",
    "Time from receiving a review's header to answering it.",
    (),
    REVIEW_BUCKETS_S,
)
DEVICES = Metric(
    "cotenant_plugin_devices", "gauge", "Units of the resource offered to the kubelet.", ("resource", "health")
)
ALLOCATIONS = Metric(
    "cotenant_plugin_allocations_total",
    "counter",
    "Containers for which devices were allocated or refused.",
    ("resource", "outcome"),
)
REGISTRATIONS = Metric(
    "cotenant_plugin_registrations_total", "counter", "Registrations with the kubelet.", ("resource",)
)
BOUND = Metric("cotenant_plugin_bound_containers", "gauge", "Containers that have their tenant in the agent.")
UNBOUND = Metric("cotenant_plugin_unbound_containers", "gauge", "Containers whose share the agent refused.")
ESCAPED = Metric(
    "cotenant_plugin_escaped_processes", "gauge", "Processes of pods that use a GPU without a limit on their share."
)


def _of(*owners: str) -> tuple[Metric, ...]:
    """Return the metrics of this module whose names begin with cotenant_OWNER_, in the order of their definition."""
    starts = tuple(f"cotenant_{owner}_" for owner in owners)
    return tuple(each for each in globals().values() if isinstance(each, Metric) and each.name.startswith(starts))


AGENT, SERVER, MODEL = _of("gpu", "agent", "turn", "tenant"), _of("server"), _of("model")
FLEET, WEBHOOK, PLUGIN = _of("fleet"), _of("webhook"), _of("plugin")


def every() -> tuple[Metric, ...]:
    """Return all live metrics, in the order in which docs and dashboards list them."""
    return AGENT + SERVER + MODEL + FLEET + WEBHOOK + PLUGIN

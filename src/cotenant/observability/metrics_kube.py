"""Live metrics of the Kubernetes webhook and device plugin."""

from __future__ import annotations

from cotenant.observability.metric import Metric

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

WEBHOOK: tuple[Metric, ...] = (REVIEWS, REVIEW_SECONDS)
PLUGIN: tuple[Metric, ...] = (DEVICES, ALLOCATIONS, REGISTRATIONS, BOUND, UNBOUND, ESCAPED)

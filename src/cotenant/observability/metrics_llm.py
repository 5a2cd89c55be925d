"""The live metrics of language models; metrics.py includes them in the list of all metrics."""

from __future__ import annotations

from cotenant.observability.metric import Metric

MODEL_STATE = Metric(
    "cotenant_model_state", "gauge",
    "1 for the current state: cold, starting, resident, leaving, evicted, coming back.", ("model", "state"),
)  # fmt: skip
MODEL_WAITING = Metric("cotenant_model_waiting", "gauge", "Requests in the model's queue.", ("model",))
MODEL_OPEN = Metric("cotenant_model_open", "gauge", "Requests that the model's program is processing.", ("model",))
MODEL_REQUESTS = Metric(
    "cotenant_model_requests_total", "counter",
    "Finished requests by outcome: ok, error (of the program), full, unavailable, failed, "
    "cancelled.",
    ("model", "outcome"),
)  # fmt: skip
MODEL_RETRIES = Metric(
    "cotenant_model_retries_total",
    "counter",
    "Requests sent to a program again after a first attempt failed.",
    ("model",),
)
MODEL_TTFT = Metric(
    "cotenant_model_first_token_seconds", "histogram", "Time from a streaming request to its first event.", ("model",),
    (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0),
)  # fmt: skip
MODEL_TPOT = Metric(
    "cotenant_model_token_seconds", "histogram", "Mean time between events of a stream.", ("model",),
    (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
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

MODEL = tuple(each for name, each in list(globals().items()) if isinstance(each, Metric))

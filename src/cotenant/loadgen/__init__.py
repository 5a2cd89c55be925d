"""The load generator: schedules, senders, results, experiments."""

from cotenant.core.extras import require

require("serve", "numpy", "orjson", "hpack", "google.protobuf")

"""The load generator: schedules of requests, their senders, results, and experiments that compare them with
simulations.
"""

from cotenant.core.extras import require

require("serve", "numpy", "orjson", "hpack", "google.protobuf")

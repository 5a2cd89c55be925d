"""The load generator: schedules requests, sends them and evaluates the answers. Its experiments compare the measured
results with simulations.
"""

from cotenant.core.extras import require

require("serve", "numpy", "orjson", "hpack", "google.protobuf")

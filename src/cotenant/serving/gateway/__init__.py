"""HTTP and gRPC front of the server."""

from cotenant.core.extras import require

require("serve", "numpy", "orjson", "httptools", "hpack", "google.protobuf")

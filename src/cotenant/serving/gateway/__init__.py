"""The gateway: the server's endpoints for HTTP and gRPC."""

from cotenant.core.extras import require

require("serve", "numpy", "orjson", "httptools", "hpack", "google.protobuf")

"""The Open Inference Protocol: tensors, JSON, gRPC messages, the OpenAPI document."""

from cotenant.core.extras import require

require("serve", "numpy")

"""The Open Inference Protocol: tensors, JSON, gRPC messages, the OpenAPI document."""

"""HTTP and gRPC front of the server."""

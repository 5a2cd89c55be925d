"""Live page, its event stream and the Prometheus metrics, with the standard library alone."""

"""From requests to batches: the live state of the server."""

"""Request arrivals: arrival processes, recorded traces, scenario sets."""

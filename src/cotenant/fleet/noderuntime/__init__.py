"""Runtime on a fleet's node: jobs, their runners, limits."""

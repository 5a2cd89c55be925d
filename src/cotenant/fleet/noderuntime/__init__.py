"""What runs on a fleet's node: jobs, their runner, limits."""

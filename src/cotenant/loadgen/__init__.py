"""The load generator: schedules, senders, results, experiments."""

"""The job store, in SQLite or PostgreSQL."""

"""The fleet controller: job table, decisions, orders to nodes."""

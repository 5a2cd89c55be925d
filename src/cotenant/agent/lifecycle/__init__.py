"""Tenants from admission to their end, and over restarts and changes of the configuration."""

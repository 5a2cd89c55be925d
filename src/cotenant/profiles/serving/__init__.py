"""Latency of served models by batch and partition: tables, files, interference between neighbours."""

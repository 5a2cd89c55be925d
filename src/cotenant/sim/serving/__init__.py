"""Inference services in virtual time, request by request."""

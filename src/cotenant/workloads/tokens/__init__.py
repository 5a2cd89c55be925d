"""Requests to language models: times, models, tokens in and out; readers, generators, texts."""

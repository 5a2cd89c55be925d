"""A stand-in for an LLM engine: OpenAI's API, and batched steps whose lengths come from a profile. Runs no model."""

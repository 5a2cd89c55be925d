"""An engine of language models that only takes time: OpenAI's API, batched steps as long as a profile says."""

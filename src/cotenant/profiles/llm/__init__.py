"""Step times of a language model's engine: their profile, its files, and its fit to measurements."""

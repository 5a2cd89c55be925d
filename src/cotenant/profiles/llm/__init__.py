"""Step times of a language model's engine: the profile, its files, its fit."""

"""What a step of a language model's engine takes: the profile, its files, its fit."""

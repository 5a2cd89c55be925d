"""The agent's configuration: files and settings, validated."""

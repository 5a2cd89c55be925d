"""Time slices handed out by the token broker."""

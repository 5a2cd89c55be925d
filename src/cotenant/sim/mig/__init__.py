"""MIG partition policies in virtual time."""

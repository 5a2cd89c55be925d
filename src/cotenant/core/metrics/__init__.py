"""Pure functions of a record."""

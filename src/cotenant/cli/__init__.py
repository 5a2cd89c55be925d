"""Command line: one thin module per verb."""

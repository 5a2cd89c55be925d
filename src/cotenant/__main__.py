"""Runs the command `cotenant` as `python -m cotenant`, for users who choose the Python interpreter themselves."""

from __future__ import annotations

from cotenant.cli.main import main

if __name__ == "__main__":
    main()

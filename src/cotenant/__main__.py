"""`python -m cotenant`: the command line, where the interpreter is chosen by hand."""

from __future__ import annotations

from cotenant.cli.main import main

if __name__ == "__main__":
    main()

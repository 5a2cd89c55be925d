"""Entry point of the command `cotenant`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is being loaded ends the process at once, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell starts a job in the background with the signal ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cotenant.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()

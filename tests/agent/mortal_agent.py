"""An agent that kills itself at a step of its work, for tests of what it leaves behind.

A step is the sending or receiving of a message of a process, or the writing of the state file; the agent dies before or
after it. Steps count from the moment when the file `mortal` is in the agent's folder, which contains the number of the
step at which the agent dies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.agent.__main__ import main
from cotenant.agent.lifecycle.state import StateFile
from cotenant.agent.shims.requests import Requests
from cotenant.agent.tenants.tenant import Session

ORDER = Path(sys.argv[sys.argv.index("--dir") + 1]) / "mortal"
taken = 0


def step() -> None:
    """Take a step; the last one does not return."""
    global taken
    if not ORDER.exists():
        taken = 0
        return
    taken += 1
    if taken >= int(ORDER.read_text()):
        ORDER.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*given: Any, **named: Any) -> Any:
        step()
        result = function(*given, **named)
        step()
        return result

    return wrapped


for owner, names in ((Session, ("send",)), (Requests, ("receive",)), (StateFile, ("save_now",))):
    for name in names:
        setattr(owner, name, mortal(getattr(owner, name)))
sys.exit(main())

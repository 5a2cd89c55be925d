"""`cotenant slurm`: prolog and epilog for Slurm. A job requests a share in its comment; the prolog has the node's agent
hold the share, and the epilog releases it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cotenant.core.folders import agent_folder

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Slurm: prolog and epilog that give a job its share."
)

Folder = Annotated[Path | None, typer.Option("--dir", help="Folder of the agent's sockets.")]


@app.command()
def prolog(folder: Folder = None) -> None:
    """For Prolog= in slurm.conf: reserve the job's share on this node's agent. Does nothing for jobs without a
    share."""
    from cotenant.agent.owners.slurm import start

    said = start(os.environ, folder or agent_folder())
    if said:
        print(f"cotenant slurm: {said}", file=sys.stderr)


@app.command("task-prolog")
def task_prolog(folder: Folder = None) -> None:
    """For TaskProlog= in slurm.conf: print the environment of the job's tasks.

    If the share was refused, the reason is printed into the job's output, since Slurm shows no errors of task prologs.
    """
    from cotenant.agent.owners.slurm import task_lines
    from cotenant.core.errors import InputError, WorkError

    try:
        for line in task_lines(os.environ, folder or agent_folder()):
            print(line)
    except (InputError, WorkError) as error:
        print(f"print cotenant: {error}")
        raise


@app.command()
def epilog(folder: Folder = None) -> None:
    """For Epilog= in slurm.conf: release the job's share. Does nothing for jobs without a share."""
    from cotenant.agent.owners.slurm import end

    end(os.environ, folder or agent_folder())

"""`cotenant profile`: measure jobs, services and kernels on shares, and write profiles for planners and the
simulator.
"""

from __future__ import annotations

import typer

from cotenant.cli import profile_job, profile_kernels, profile_llm, profile_service

app = typer.Typer(no_args_is_help=True, help="Measure jobs, services and kernels on shares of a machine.")
app.command("job", context_settings={"allow_interspersed_args": False})(profile_job.job)
app.command("kernels", context_settings={"allow_interspersed_args": False})(profile_kernels.kernels)
app.command("llm")(profile_llm.llm)
app.command("service")(profile_service.service)


@app.callback()
def _group() -> None:
    """Measure jobs, services and kernels on shares of a machine."""

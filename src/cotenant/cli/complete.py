"""Values of options and arguments for shell completion. Imported only during a completion."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

# a function that returns pairs of a value and the description that a shell may show beside the value
Values = Callable[[], Iterable[tuple[str, str]]]


def _policies(kind: str) -> Values:
    def values() -> Iterable[tuple[str, str]]:
        from cotenant.cli.policies import policy_lists

        return policy_lists()[kind].items()

    return values


def _plain(*values: str) -> Values:
    return lambda: [(value, "") for value in values]


def _mechanisms() -> Iterable[tuple[str, str]]:
    from cotenant.agent.mechanisms import registry
    from cotenant.agent.mechanisms.base import Use

    return [(registry.AUTO, "the default for the GPU"), *((name, "") for name in registry.names(Use.TENANT))]


def _gpu_models() -> Iterable[tuple[str, str]]:
    from cotenant.core.gpus import CATALOG

    return [(name, "") for name in CATALOG]


def _tenants() -> Iterable[tuple[str, str]]:
    """Return the tenants of the agent that this user's commands reach; none if no agent answers."""
    from cotenant.agent.ipc.client import ControlClient
    from cotenant.core.folders import agent_folder

    with ControlClient(agent_folder(), timeout_s=2.0) as client:
        return [(tenant["name"], tenant["state"]) for tenant in client.call("ps")["tenants"]]


def _jobs() -> Iterable[tuple[str, str]]:
    """Return the open jobs of this user's fleet."""
    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient

    with FleetClient(fleet_folder(), timeout_s=2.0) as client:
        return [(str(job["id"]), f"{job['name']}, {job['state']}") for job in client.call("queue", all=False)["jobs"]]


def _files() -> Iterable[tuple[str, str]]:
    from cotenant.api.file_formats import FORMATS

    return [(name, form.title) for name, form in FORMATS.items()]


def _experiments() -> Iterable[tuple[str, str]]:
    from cotenant.loadgen.experiment import shipped

    return shipped().items()


SOURCES: dict[str, Values] = {
    **{f"--{kind}": _policies(kind) for kind in ("ordering", "allotment", "placement", "policy", "planner")},
    "--discipline": _policies("discipline"),
    "--colocation": _policies("colocation"),
    "--mechanism": _mechanisms,
    "--oversubscribe": _plain("none", "swap", "managed", "park"),
    "--speeds": _plain("matrix", "two-speed"),
    "--finish": _plain("exact", "lease-end"),
    "--record": _plain("auto", "all", "no-moves"),
    "--log-level": _plain("debug", "info", "warning", "error"),
    "--log-format": _plain("text", "json"),
    "--join": _tenants,
}
# verb -> values of its argument, and of options that mean something else in other verbs
OF_VERB: dict[str, dict[str, Values]] = {
    **{verb: {"name": _tenants} for verb in ("set", "stop", "park", "resume")},
    "preempt": {"names": _tenants},
    **{verb: {"--gpu": _gpu_models, "--trace-gpu": _gpu_models} for verb in ("simulate", "fleet", "trace", "mig")},
    **{verb: {"job": _jobs, "ids": _jobs} for verb in ("logs", "cancel")},
    "schema": {"kind": _files},
    "experiment": {"file": _experiments},
}


def attach(verb: str, command: Any) -> None:
    """Attach shell completion to those parameters of a command, and of its subcommands, for which SOURCES or OF_VERB
    has a function that lists values.
    """
    for inner in getattr(command, "commands", {}).values():
        attach(verb, inner)
    sources = SOURCES | OF_VERB.get(verb, {})
    for parameter in command.params:
        names = parameter.opts if parameter.param_type_name == "option" else [parameter.name]
        source = next((sources[name] for name in names if name in sources), None)
        if source is not None:
            parameter.shell_complete = _completing(source)


def _completing(source: Values) -> Any:
    """Return the `shell_complete` method of an option that completes values from `source`. It is taken from an option
    that typer creates with `autocompletion`.
    """
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(value: Annotated[str, typer.Option(autocompletion=_of(source))] = "") -> None:
        """This function is never called: only its option is used."""

    return typer.main.get_command(app).params[0].shell_complete


def _of(source: Values) -> Callable[[str], list[tuple[str, str]]]:
    """Return the completion function that typer calls. It returns no values after an error, since a shell that
    completes must not print a traceback.
    """

    def values(incomplete: str) -> list[tuple[str, str]]:
        with contextlib.suppress(Exception):
            return [(value, note) for value, note in source() if value.startswith(incomplete)]
        return []

    return values

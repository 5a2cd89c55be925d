"""The entry point of the command line: imports only the module of the given verb and prints every error as one
sentence.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from cotenant import __version__
from cotenant.core.errors import InputError, WorkError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

# panel of --help -> verb -> (module with its `app`, line of help)
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Start here": {
        "doctor": ("cotenant.cli.doctor", "Check what this machine can enforce, and what prevents it."),
        "demo": ("cotenant.cli.demo", "Simulate six policies on a seeded trace; table and HTML report."),
    },
    "Share GPUs": {
        "agent": ("cotenant.cli.agent", "Own this node's GPUs and share them among tenants."),
        "run": ("cotenant.cli.run", "Run a program as a tenant: with a share, a memory limit and turns."),
        "ps": ("cotenant.cli.ps", "List the tenants of this node's agent."),
        "top": ("cotenant.cli.top", "Show tenants live: requested and actual share, memory, turns, waiting."),
        "set": ("cotenant.cli.set", "Change a tenant's share while it runs."),
        "stop": ("cotenant.cli.stop", "Stop a tenant's processes."),
        "park": ("cotenant.cli.park", "Free the GPU memory of a running program until it is resumed."),
        "resume": ("cotenant.cli.resume", "Resume a parked program, on the same or another GPU."),
        "preempt": ("cotenant.cli.preempt", "Park tenants until enough GPU memory is free."),
        "mig": ("cotenant.cli.mig", "MIG layouts: list, plan, and apply to this machine's GPUs."),
        "kube": ("cotenant.cli.kube", "Kubernetes: webhook, device plugin, resource claims."),
        "slurm": ("cotenant.cli.slurm", "Slurm: prolog and epilog that give a job its share."),
    },
    "Serve models": {
        "serve": ("cotenant.cli.serve", "Serve inference requests for many models on shared GPUs."),
        "load": ("cotenant.cli.load", "Load-test a server: SLO attainment, percentiles, the largest load within SLOs."),
        "plan": ("cotenant.cli.plan", "Divide GPUs into gpulets for services with SLOs."),
        "plan-convert": (
            "cotenant.cli.plan_convert",
            "Convert files of the public gpulet scheduler from and to services files.",
        ),
        "infer": ("cotenant.cli.infer", "Load and measure one model on a share of this machine."),
        "experiment": ("cotenant.cli.experiment", "Run a server under load and write an analysis."),
        "timed-llm": (
            "cotenant.cli.timed_llm",
            "A stand-in for an LLM engine: answers take realistic time, text is fixed.",
        ),
    },
    "Run training jobs": {
        "fleet": ("cotenant.cli.fleet", "Training runtime on Ray or local processes: up, down, status."),
        "submit": ("cotenant.cli.submit", "Submit a job to the fleet: a job file, or -- and a program."),
        "queue": ("cotenant.cli.queue", "List the fleet's jobs: where they run, progress, why they wait."),
        "logs": ("cotenant.cli.logs", "Print or follow a job's output."),
        "cancel": ("cotenant.cli.cancel", "Cancel jobs of the fleet."),
    },
    "Compare policies": {
        "simulate": ("cotenant.cli.simulate", "Simulate a trace on a cluster and print the figures."),
        "sweep": ("cotenant.cli.sweep", "Simulate every combination of a sweep file on all cores; resumable."),
        "compare": ("cotenant.cli.compare", "Compare any number of runs, as a table or one HTML page."),
        "explain": ("cotenant.cli.explain", "Tell when and why a job waited, ran and was moved."),
        "trace": ("cotenant.cli.trace", "Inspect, convert and generate traces."),
        "policies": ("cotenant.cli.policies", "List every policy with what it does."),
        "predict": ("cotenant.cli.predict", "Predict speeds on MIG slices from latencies measured under MPS."),
    },
    "Measure and watch": {
        "profile": ("cotenant.cli.profile", "Measure jobs, services and kernels on shares of a machine."),
        "bench": ("cotenant.cli.bench", "Benchmark shares, copies and co-location against a baseline of the same run."),
        "dashboard": ("cotenant.cli.dashboard", "Show several agents, servers and fleets on one live page."),
        "metrics": ("cotenant.cli.metrics", "List every live metric."),
        "schema": (
            "cotenant.cli.schema",
            "Print the JSON Schema of a file, for an editor that completes and checks it.",
        ),
    },
}
VERBS = {verb: row for verbs in PANELS.values() for verb, row in verbs.items()}
PANEL_OF = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}

# verb -> the extra of the package that it needs; other verbs need none, or their subcommands need different extras
EXTRA_OF = {
    **dict.fromkeys(("simulate", "sweep", "trace", "predict", "policies", "demo"), "sim"),
    **dict.fromkeys(("compare", "explain"), "report"),
    **dict.fromkeys(("mig", "plan", "plan-convert"), "plan"),
    **dict.fromkeys(("serve", "infer", "timed-llm", "experiment", "load"), "serve"),
    "fleet": "fleet",
    "kube": "kube",
}

MOST_SHOWN = 2000  # an error message is cut to this many characters


def _module(verb: str, args: list[str]) -> str:
    """Return the module that implements a verb (the first word of a command). If a verb has several modules, the
    arguments select one. `simulate` has four: for traces of jobs, for requests on services, for an agent's tenants, and
    for language models. `load` and `plan` have two each: for services and for language models.
    """
    if verb == "plan":
        from cotenant.cli import plan_llm

        if plan_llm.wanted(args):
            return plan_llm.__name__
    if verb == "load" and any(arg.partition("=")[0] == "--openai" for arg in args):
        return "cotenant.cli.load_llm"
    if verb == "simulate" and "--serving" in args:
        return "cotenant.cli.simulate_llm"
    if verb == "simulate" and "--trace" not in args:
        from cotenant.cli import simulate_serving, simulate_turns

        for module in (simulate_turns, simulate_serving):
            if module.wanted(args):
                return module.__name__
    return VERBS[verb][0]


def _refuse_two_forms(args: list[str]) -> None:
    """Refuse arguments of `simulate` that ask for two of its forms. Raises InputError."""
    given = {arg.partition("=")[0] for arg in args}
    if {"--agent", "--trace"} <= given:
        raise InputError(
            "cannot be given together with --trace: an agent's tenants have their work from --load, "
            "and a trace has the jobs of a cluster",
            field="--agent",
        )


class LazyGroup(TyperGroup):
    """A group that imports a verb's module only when the verb runs, so that --help stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        help_line = VERBS[cmd_name][1]
        return TyperCommand(cmd_name, help=help_line, callback=lambda: None, rich_help_panel=PANEL_OF[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name not in VERBS:
            hint = nearest(name, VERBS)
            if hint and not ctx.resilient_parsing:
                raise InputError(f"no such command '{name}'; {hint}")
            return super().resolve_command(ctx, args)
        if name == "simulate" and not ctx.resilient_parsing:
            _refuse_two_forms(args[1:])
        module = importlib.import_module(_module(name, args[1:]))
        if hasattr(module, "refuse_trace") and not ctx.resilient_parsing:
            module.refuse_trace(args[1])
        command = typer.main.get_command(module.app)
        _refuse_empty(command)
        _show_plain_flags(command, ctx)
        if ctx.resilient_parsing:  # a shell is completing a command line
            from cotenant.cli import complete

            complete.attach(name, command)
        return name, command, args[1:]


def _show_plain_flags(command: Any, ctx: Any) -> None:
    """Keep the help of a command from showing <bool> beside options that take no value."""
    for sub in getattr(command, "commands", {}).values():
        _show_plain_flags(sub, ctx)
    _without_types(command.get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _refuse_empty(command: Any) -> None:
    """Make a command refuse empty values of options. An empty value usually comes from a shell variable that is not
    set; if it were ignored, the user would not notice that, for example, a memory limit is missing.
    """
    for sub in getattr(command, "commands", {}).values():
        _refuse_empty(sub)
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.default != "":
            parameter.process_value = functools.partial(_process_filled, parameter, parameter.process_value)


def _process_filled(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else (value,)
    if "" in values:
        raise InputError("its value is empty; leave the option out, or write a value", field=parameter.opts[0])
    options = {"--help"}.union(*(each.opts for each in context.command.params if each.param_type_name == "option"))
    if swallowed := next((each for each in values if isinstance(each, str) and each in options), None):
        raise InputError(f"its value is missing: {swallowed} follows, which is an option", field=parameter.opts[0])
    return process(context, value)


app = typer.Typer(
    name="cotenant",
    cls=LazyGroup,
    help="Share and schedule GPUs among deep-learning tenants: plan, simulate, enforce.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        print(f"cotenant {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Share and schedule GPUs among deep-learning tenants: plan, simulate, enforce."""


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 the operation failed, 2 wrong input."""
    try:
        from cotenant.core import logs

        logs.configure_short()
        if sys.stdout is None:  # the caller of this command has closed standard output (>&-)
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        code = app(standalone_mode=False)  # with standalone_mode, typer would print errors as a box of several lines
        sys.stdout.flush()  # flushed here, so that a full disk is reported like any other error
    except InputError as error:
        fail(str(by_option(error, sys.argv)), 2)
    except WorkError as error:
        fail(str(error), 1)
    except typer.TyperException as error:
        fail_usage(error)
    except ModuleNotFoundError as error:
        fail_missing(error)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    except BrokenPipeError:
        # the program that reads this command's output (head, less) has exited, which is no error
        _forget_output()
        sys.exit(0)
    except OSError as error:
        _forget_output()
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}reading or writing failed: {(error.strerror or str(error)).lower()}", 1)
    except MemoryError:
        fail("this machine has not enough memory for this command", 1)
    if code == 130:  # typer exits with 130 after Ctrl-C
        fail("interrupted", code)
    sys.exit(code if isinstance(code, int) else 0)


def _forget_output() -> None:
    """Redirect standard output to /dev/null, so that Python does not fail on its final flush."""
    # standard output may have no file descriptor that could be redirected
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(sentence: str, code: int) -> NoReturn:
    """Print one line on standard error and exit with `code`."""
    print(f"cotenant: {one_line(sentence)}", file=sys.stderr)
    sys.exit(code)


def by_option(error: InputError, words: list[str]) -> InputError:
    """Return an error that names the command's option instead of the field, if the field has an option."""
    option = f"--{(error.field or '').replace('_', '-')}"
    if (
        not error.field
        or error.file is not None
        or error.line is not None
        or option not in {word.partition("=")[0] for word in words}
    ):
        return error
    return type(error)(error.message, field=option)


def one_line(sentence: str) -> str:
    """Make a message one printable line of bounded length, since text quoted from files may contain anything."""
    line = " ".join("".join(c if c.isprintable() else "\ufffd" for c in word) for word in sentence.split())
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"


def fail_usage(error: typer.TyperException) -> NoReturn:
    """Report an unparsable command line as one sentence; without any arguments, print the help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cotenant"
    message = bad_value(error) or error.format_message().strip().rstrip(".")
    if not message or message.startswith("Usage: "):  # typer has already printed this message with rich
        print(message, end="\n" if message else "", file=sys.stderr)
        sys.exit(2)
    fail(f"{message[:1].lower()}{message[1:]}; see {path} --help", error.exit_code)


def bad_value(error: typer.TyperException) -> str:
    """Return the message for an invalid number, in the form of all other errors; empty if the mistake is not an invalid
    number.
    """
    parameter = getattr(error, "param", None)
    cause: Any = error.__cause__ or error.__context__
    if parameter is None or not hasattr(cause, "errors"):
        return ""
    found = cause.errors()[0]
    limits = found.get("ctx", {})
    says = {
        "int_parsing": "is not a whole number",
        "float_parsing": "is not a number",
        "greater_than_equal": f"is less than {limits.get('ge')}",
        "less_than_equal": f"is over {limits.get('le')}",
    }.get(found["type"])
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()
    return f"{name}: {found['input']!r} {says}" if says else ""


def fail_missing(error: ModuleNotFoundError) -> NoReturn:
    """Print the message for a missing module that an extra provides. Names the verb's own extra, if that provides the
    module.
    """
    from cotenant.core.extras import MissingExtraError, extra_of

    verb = next((word for word in sys.argv[1:] if word in VERBS), "")
    package_s = error.extra if isinstance(error, MissingExtraError) else None
    extra = extra_of(error.name or "", preferred=EXTRA_OF.get(verb, package_s))
    if extra is None:
        raise error
    fail(f"{verb} needs the extra \"{extra}\": pip install 'cotenant[{extra}]'", 2)


if __name__ == "__main__":
    main()

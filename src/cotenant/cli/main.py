"""Entry point: finds the verb, imports only that verb's module, turns errors into one sentence."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from cotenant import __version__

# panel of --help -> verb -> (module that exposes `app`, one line of help); a module is imported when its verb is used
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Start here": {
        "doctor": ("cotenant.cli.doctor", "Tell what would hold on this machine, and what stands in the way."),
        "demo": ("cotenant.cli.demo", "Six policies on a seeded trace, a table and an HTML report."),
    },
    "Share GPUs": {
        "agent": ("cotenant.cli.agent", "Own this node's GPUs and share them among tenants."),
        "run": ("cotenant.cli.run", "Run a program as a tenant: its share, its memory, its turns."),
        "ps": ("cotenant.cli.ps", "List the tenants of this node's agent."),
        "top": ("cotenant.cli.top", "Show tenants live: share asked and got, memory, turns, waiting."),
        "set": ("cotenant.cli.set", "Change a tenant's share while it runs."),
        "stop": ("cotenant.cli.stop", "Stop a tenant's processes."),
        "park": ("cotenant.cli.park", "Free the GPU of a running program, for later."),
        "resume": ("cotenant.cli.resume", "Bring a parked program back, on the same or another GPU."),
        "preempt": ("cotenant.cli.preempt", "Park tenants until a GPU has room for something else."),
        "mig": ("cotenant.cli.mig", "MIG layouts: list, plan, and apply to this machine's GPUs."),
        "kube": ("cotenant.cli.kube", "Kubernetes: webhook, device plugin, claims."),
        "slurm": ("cotenant.cli.slurm", "Slurm: prolog and epilog that give a job its share."),
    },
    "Serve models": {
        "serve": ("cotenant.cli.serve", "Answer inference requests for many models on shared GPUs."),
        "load": ("cotenant.cli.load", "Drive a server with requests: attainment, percentiles, the largest load."),
        "plan": ("cotenant.cli.plan", "Cut GPUs into gpulets for services under SLOs."),
        "plan-convert": ("cotenant.cli.plan_convert", "Files of the public gpulet scheduler: read and write them."),
        "infer": ("cotenant.cli.infer", "Run one model on one share of this machine, for a first look."),
        "experiment": ("cotenant.cli.experiment", "Boot a server, load it, stop both, write the analysis."),
        "timed-llm": ("cotenant.cli.timed_llm", "An engine of OpenAI's API whose answers only take time."),
    },
    "Run training jobs": {
        "fleet": ("cotenant.cli.fleet", "Run training jobs by a policy, on Ray or plain processes: up, down, status."),
        "submit": ("cotenant.cli.submit", "Give the fleet a job: a file, or -- and a program."),
        "queue": ("cotenant.cli.queue", "List the fleet's jobs: where they run, how far, why they wait."),
        "logs": ("cotenant.cli.logs", "Print, or follow, what a job prints."),
        "cancel": ("cotenant.cli.cancel", "Take jobs of the fleet back."),
    },
    "Compare policies": {
        "simulate": ("cotenant.cli.simulate", "Run a trace on a cluster in virtual time and print what came out."),
        "sweep": ("cotenant.cli.sweep", "Run every combination of a sweep file, on all cores, resumable."),
        "compare": ("cotenant.cli.compare", "Put any number of runs side by side, as a table or one HTML page."),
        "explain": ("cotenant.cli.explain", "Tell one job's life in words: when and why it waited, ran, was moved."),
        "trace": ("cotenant.cli.trace", "Inspect, convert and generate traces."),
        "policies": ("cotenant.cli.policies", "List every policy with what it does."),
        "predict": ("cotenant.cli.predict", "MIG speeds from latencies measured under MPS."),
    },
    "Measure and watch": {
        "profile": ("cotenant.cli.profile", "Measure what work does on a share: jobs, services, kernels."),
        "bench": ("cotenant.cli.bench", "Comparisons against a baseline of the same run: shares, copies, schemes."),
        "dashboard": ("cotenant.cli.dashboard", "Agents, servers and fleets on one live page."),
        "metrics": ("cotenant.cli.metrics", "List every live metric."),
        "schema": (
            "cotenant.cli.schema",
            "Print the JSON Schema of a file, for an editor that completes and checks it.",
        ),
    },
}
VERBS = {verb: row for verbs in PANELS.values() for verb, row in verbs.items()}
PANEL_OF = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}

# verb -> the extra that it needs; others need the base alone, or what their subcommand needs
EXTRA_OF = {
    **dict.fromkeys(("simulate", "sweep", "trace", "predict", "policies", "demo"), "sim"),
    **dict.fromkeys(("compare", "explain"), "report"),
    **dict.fromkeys(("mig", "plan", "plan-convert"), "plan"),
    **dict.fromkeys(("serve", "infer", "timed-llm", "experiment", "load"), "serve"),
    "fleet": "fleet",
    "kube": "kube",
}

MOST_SHOWN = 2000  # characters of an error


def _module(verb: str, args: list[str]) -> str:
    """The module of a verb. `simulate` has four: a trace of jobs, requests on services, an agent's tenants, language
    models; `load` and `plan` have two: services, language models."""
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


class LazyGroup(TyperGroup):
    """A group that imports a verb's module only when the verb runs, so that --help stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        help_line = VERBS[cmd_name][1]
        return TyperCommand(cmd_name, help=help_line, callback=lambda: None, rich_help_panel=PANEL_OF[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name not in VERBS:
            import difflib

            from cotenant.core.errors import InputError

            close = difflib.get_close_matches(name, VERBS, 1)
            if close and not ctx.resilient_parsing:
                raise InputError(f"no such command '{name}'; did you mean {close[0]}?")
            return super().resolve_command(ctx, args)
        command = typer.main.get_command(importlib.import_module(_module(name, args[1:])).app)
        if ctx.resilient_parsing:  # a shell asks what may follow
            from cotenant.cli import complete

            complete.attach(name, command)
        return name, command, args[1:]


app = typer.Typer(
    name="cotenant",
    cls=LazyGroup,
    help="Share and schedule GPUs among deep-learning tenants: decide, simulate, enforce.",
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
    """Share and schedule GPUs among deep-learning tenants: decide, simulate, enforce."""


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 the work failed, 2 the input was wrong."""
    from cotenant.core import logs
    from cotenant.core.errors import InputError, WorkError

    logs.configure_short()
    try:
        if sys.stdout is None:  # closed by the caller (>&-)
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        code = app(standalone_mode=False)  # else typer would print its errors as a box of several lines
        sys.stdout.flush()  # what is still buffered may find the disk full
    except InputError as error:
        fail(str(error), 2)
    except WorkError as error:
        fail(str(error), 1)
    except typer.TyperException as error:
        fail_usage(error)
    except ModuleNotFoundError as error:
        fail_missing(error)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    except BrokenPipeError:
        # the reader of our output (head, less) has gone: not an error of ours
        _forget_output()
        sys.exit(0)
    except OSError as error:
        _forget_output()
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}reading or writing failed: {(error.strerror or str(error)).lower()}", 1)
    except MemoryError:
        fail("the memory of this machine does not suffice", 1)
    if code == 130:  # what typer makes of Ctrl-C
        fail("interrupted", code)
    sys.exit(code if isinstance(code, int) else 0)


def _forget_output() -> None:
    """Nothing can be written to standard output any more; Python must not try it again at its end."""
    with contextlib.suppress(io.UnsupportedOperation):  # no stream of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(sentence: str, code: int) -> NoReturn:
    """Print one line on standard error and leave."""
    print(f"cotenant: {one_line(sentence)}", file=sys.stderr)
    sys.exit(code)


def one_line(sentence: str) -> str:
    """The sentence as a terminal can show it: what it quotes from a file may be anything, and of any length."""
    line = " ".join("".join(c if c.isprintable() else "\ufffd" for c in word) for word in sentence.split())
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"


def fail_usage(error: typer.TyperException) -> NoReturn:
    """A command line that cannot be parsed: one sentence; the help where nothing was given at all."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cotenant"
    message = error.format_message().strip().rstrip(".")
    if not message or message.startswith("Usage: "):  # the help, which typer has printed already where it has rich
        print(message, end="\n" if message else "", file=sys.stderr)
        sys.exit(2)
    fail(f"{message[:1].lower()}{message[1:]}; see {path} --help", error.exit_code)


def fail_missing(error: ModuleNotFoundError) -> NoReturn:
    """A module that an extra brings is not installed: name the extra, the verb's own where it brings it."""
    from cotenant.core.extras import MissingExtraError, extra_of

    verb = next((word for word in sys.argv[1:] if word in VERBS), "")
    package_s = error.extra if isinstance(error, MissingExtraError) else None
    extra = extra_of(error.name or "", preferred=EXTRA_OF.get(verb, package_s))
    if extra is None:
        raise error
    fail(f"{verb} needs the extra \"{extra}\": pip install 'cotenant[{extra}]'", 2)


if __name__ == "__main__":
    main()

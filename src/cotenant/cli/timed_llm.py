"""`cotenant timed-llm`: an engine of OpenAI's API whose answers only take time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def timed_llm(
    model: Annotated[str, typer.Option(help="Name that requests give; every token of an answer has it.")] = "timed",
    profile: Annotated[
        str, typer.Option(help="File of `cotenant profile llm`, or a size (8b): estimated for an H100.")
    ] = "8b",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free, which is printed.")] = 8000,
    speed: Annotated[float, typer.Option(help="Steps are so many times faster than the profile.")] = 1.0,
    device: Annotated[str, typer.Option(metavar="clock|cuda", help="cuda: steps are kernels of device 0.")] = "clock",
    memory: Annotated[str | None, typer.Option(help="Device memory to hold, with --device cuda: 16GiB.")] = None,
    load: Annotated[str, typer.Option(help="How long loading takes.")] = "0s",
) -> None:
    """Speak OpenAI's API without a model: chat, completions, streams, embeddings, with iteration-level batching and
    steps as long as the profile says. Answers name the model and the prompt, so one of a wrong model is seen."""
    from dataclasses import replace

    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_memory, parse_seconds
    from cotenant.profiles.llm.files import find_profile
    from cotenant.timed_llm.serve import run

    if device not in ("clock", "cuda"):
        raise InputError(f"{device!r} is not clock or cuda", field="device")
    if not 1e-3 <= speed <= 1e3:
        raise InputError(f"a speed of {speed:g} is not between 0.001 and 1000", field="speed")
    found = replace(find_profile(profile, model).scaled(1 / speed), name=model)
    held = 0 if memory is None else parse_memory(memory, field="memory")
    loading_s = parse_seconds(load, field="load")

    def ready(at: int, stop: Callable[[], None]) -> None:
        del stop
        print(f"{model} at http://{host}:{at}/v1", flush=True)

    run(found, host, port, device, held, loading_s, ready)

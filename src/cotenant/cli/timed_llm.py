"""`cotenant timed-llm`: an engine with OpenAI's API whose answers take realistic time but contain fixed text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def timed_llm(
    model: Annotated[str, typer.Option(help="Model name in requests; every token of an answer repeats it.")] = "timed",
    profile: Annotated[
        str, typer.Option(help="Profile written by `profile llm`, or a model size (8b), estimated for an H100.")
    ] = "8b",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one and prints it.")] = 8000,
    speed: Annotated[float, typer.Option(help="Factor by which steps are faster than in the profile.")] = 1.0,
    device: Annotated[
        str, typer.Option(metavar="clock|cuda", help="clock: steps are sleeps; cuda: steps are kernels on device 0.")
    ] = "clock",
    memory: Annotated[str | None, typer.Option(help="Device memory to allocate with --device cuda: 16GiB.")] = None,
    load: Annotated[str, typer.Option(help="Time that loading takes.")] = "0s",
) -> None:
    """Serve OpenAI's API without a model: chat, completions, streams, embeddings, with iteration-level batching and
    steps as long as in the profile. Answers contain the model's name and the prompt, so that misrouted requests are
    detected.
    """
    from dataclasses import replace

    from cotenant.core.errors import InputError
    from cotenant.core.units import parse_memory, parse_seconds
    from cotenant.profiles.llm.files import find_profile
    from cotenant.timed_llm.serve import run

    if device not in ("clock", "cuda"):
        raise InputError(f"must be clock or cuda, not {device!r}", field="device")
    if memory is not None and device != "cuda":
        raise InputError("is allocated only with --device cuda; leave it out, or add --device cuda", field="memory")
    if not 1e-3 <= speed <= 1e3:
        raise InputError(f"speed must be between 0.001 and 1000, not {speed:g}", field="speed")
    found = replace(find_profile(profile, model).scaled(1 / speed), name=model)
    held = 0 if memory is None else parse_memory(memory, field="memory")
    loading_s = parse_seconds(load, field="load")

    def ready(at: int, stop: Callable[[], None]) -> None:
        del stop
        print(f"{model} at http://{host}:{at}/v1", flush=True)

    run(found, host, port, device, held, loading_s, ready)

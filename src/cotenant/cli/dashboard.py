"""`cotenant dashboard`: several agents, servers and fleets on one live page."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.shared_options import TokenFile, shown_token

if TYPE_CHECKING:
    from cotenant.observability.merge import Remote

app = typer.Typer(add_completion=False)


@app.command()
def dashboard(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Live pages (--http) of agents, servers and controllers.")
    ],
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the page; loopback unless a host is given.")
    ] = ":9500",
    token: TokenFile = None,
) -> None:
    """Show several nodes on one page: which tenant or job has which part of which GPU, which ones wait, and why. Runs
    until stopped.
    """
    from cotenant.observability.http import parse_address
    from cotenant.observability.merge import Remote

    shown = shown_token(token)
    remotes = [Remote(url, shown) for url in urls]
    host, port = parse_address(http, "--http")
    asyncio.run(_serve(host, port, remotes))


async def _serve(host: str, port: int, remotes: list[Remote]) -> None:
    import signal
    import sys

    from cotenant.observability.exposition import Exposition
    from cotenant.observability.feed import Feed
    from cotenant.observability.http import LiveServer
    from cotenant.observability.merge import Merged

    async def no_metrics() -> str:
        return Exposition().text()  # the dashboard has no metrics of its own

    server = LiveServer(host, port, Feed(Merged(remotes)), no_metrics)
    await server.start()
    print(f"cotenant dashboard: {server.url}", file=sys.stderr, flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await server.close()

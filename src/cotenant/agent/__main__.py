"""`python -m cotenant.agent` starts the agent without the libraries that the command `cotenant` needs, for benchmarks
and minimal installations.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import Any

from cotenant.agent.daemon import Agent, AgentOptions
from cotenant.core import logs
from cotenant.core.errors import InputError, WorkError
from cotenant.core.folders import own_agent_folder
from cotenant.core.units import counted, parse_memory_or_zero

LOG = logging.getLogger("cotenant.agent")  # under -m, __name__ is "__main__"
# Time after which a thread that computes lets the event loop run, which switches tenants every few milliseconds.
# Python's default is 5 ms.
SWITCH_S = 0.0005


async def serve(options: AgentOptions) -> None:
    """Run an agent until it is stopped, and log when it is ready. Changes settings of the whole process."""
    sys.setswitchinterval(SWITCH_S)
    agent = Agent(options)

    def ready() -> None:
        names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in agent.gpus)
        # the collector of unreachable objects then passes over all that was made until now, which takes it 20 ms
        gc.collect()
        gc.freeze()
        LOG.info("ready in %s with %s: %s", options.folder, counted(len(agent.gpus), "GPU"), names)

    await agent.run(ready)


def main() -> int:
    """Parse arguments, run the agent, and print an error as one sentence."""
    parser = argparse.ArgumentParser(prog="python -m cotenant.agent")
    parser.add_argument("--dir", type=Path, default=own_agent_folder())
    parser.add_argument("--gpus", help="soft, all, or UUIDs")
    parser.add_argument("--config")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--tenant-socket", type=Path)
    parser.add_argument("--http")
    parser.add_argument("--swap-memory", metavar="SIZE")
    given = parser.parse_args()
    logs.configure()
    overrides: dict[str, Any] = {"gpus": tuple(given.gpus.split(","))} if given.gpus else {}
    try:
        if given.swap_memory:
            overrides["swap_memory_bytes"] = parse_memory_or_zero(given.swap_memory, "--swap-memory")
        options = AgentOptions(
            given.dir, given.config, given.trace,
            overrides=overrides, tenant_socket=given.tenant_socket, http=given.http,
        )  # fmt: skip
        asyncio.run(serve(options))
    except InputError as error:
        print(f"cotenant agent: {error}", file=sys.stderr)
        return 2
    except WorkError as error:
        print(f"cotenant agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

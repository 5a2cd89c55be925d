"""The configuration that holds now."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.agent.config.files import AgentConfig


@dataclass
class InForce:
    """What parts read their settings from while they run: a new version of the file replaces `config`."""

    config: AgentConfig
    fault: str = ""  # why the newest version of the file was not taken

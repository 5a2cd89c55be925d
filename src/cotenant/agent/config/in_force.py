"""Holder of the configuration in effect."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.agent.config.files import AgentConfig


@dataclass
class InForce:
    """From this, parts read their settings while they run: a new version of the file replaces `config`."""

    config: AgentConfig
    fault: str = ""  # why the newest version of the file, or part of it, is not in force
    left_out: dict[str, str] = field(default_factory=dict)  # declared tenant that does not fit -> why

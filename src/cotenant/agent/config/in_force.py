"""Holder of the configuration in effect."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.agent.config.files import AgentConfig


@dataclass
class InForce:
    """From this, parts read their settings while they run: a new version of the file replaces `config`."""

    config: AgentConfig
    fault: str = ""  # why the newest version of the file was rejected

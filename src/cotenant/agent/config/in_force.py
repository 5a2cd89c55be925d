"""The object that holds the configuration in effect."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.agent.config.files import AgentConfig


@dataclass
class InForce:
    """The configuration from which all parts of the agent read their settings. A new version of the file replaces
    `config`.
    """

    config: AgentConfig
    fault: str = ""  # why the newest version of the configuration file, or part of it, is not in effect
    left_out: dict[str, str] = field(default_factory=dict)  # declared tenant that does not fit on the GPUs -> reason

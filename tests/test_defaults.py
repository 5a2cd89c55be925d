"""Defaults are stated where a user meets them and where a caller does; they are the same."""

from __future__ import annotations

from cotenant.config import TrainingConfig
from cotenant.policy.choice import JobPolicy
from cotenant.profile.tables import load_profiles
from cotenant.sim.engine import EngineOptions
from cotenant.sim.training import engine_options, policy_of


def test_command_line_and_library_have_the_same_defaults() -> None:
    config = TrainingConfig()
    assert policy_of(config, load_profiles()) == JobPolicy()
    assert engine_options(config) == EngineOptions()

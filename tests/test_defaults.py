"""Defaults are stated where a user meets them and where a caller does; they are the same."""

from __future__ import annotations

from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions
from cotenant.sim.jobs.options import TrainingConfig
from cotenant.sim.jobs.training import engine_options, policy_of


def test_command_line_and_library_have_the_same_defaults() -> None:
    config = TrainingConfig()
    assert policy_of(config, load_profiles()) == JobPolicy()
    assert engine_options(config) == EngineOptions()

"""Fixtures and settings that tests/ and bench/ share: their conftest.py files import them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline, because the first call of a compiled function takes long. In CI, examples must be the same every day.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# A pytest worker that has used gRPC starts agents by fork. The fork handlers of gRPC would run in the child and can end
# it.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference data next to the checkout (or $COTENANT_SHARED). The test is skipped if there is none."""
    folder = Path(os.environ.get("COTENANT_SHARED", ROOT.parent / "shared"))
    if not (folder / "reference").is_dir():
        pytest.skip("the reference data beside the checkout is absent")
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line; returns exit code, stdout, stderr."""

    from cotenant.cli.main import main

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cotenant", *map(str, argv)])
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))

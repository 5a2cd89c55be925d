"""The picture of co-location schemes shows the figures of the table beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_is_drawn_from_the_table() -> None:
    spec = importlib.util.spec_from_file_location("frontier", ROOT / "docs/site/frontier.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.rows()
    assert rows["mm8192 (1.6 ms)"]["mps-plus"] == (283, 230, 110)
    assert {len(schemes) for schemes in rows.values()} == {len(module.COLOURS)}
    assert (ROOT / "docs/benchmarks/colocation-frontier.svg").read_text() == module.drawn()

"""The soak, shortened: rates change, a model comes and goes, plans change; see bench for the half hour."""

from __future__ import annotations

from pathlib import Path

from serving_soak import check, soak


def test_nothing_is_lost_while_everything_changes(tmp_path: Path) -> None:
    # on a busy machine requests may be late, but none may be lost
    check(soak(tmp_path, 12.0), attainment=0.0, growth=1.25, replans=1)

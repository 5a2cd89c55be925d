"""The soak, shortened: rates change, a model comes and goes, plans change; see bench for the half hour."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_soak import check, soak


@pytest.mark.timeout(120)
def test_nothing_is_lost_while_everything_changes(tmp_path: Path) -> None:
    # a machine that does other things as well may hold up some requests for longer than their SLO
    check(soak(tmp_path, 12.0), attainment=0.9, growth=1.25)

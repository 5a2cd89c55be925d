"""What the measurement of a language-model engine sends to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.core.errors import WorkError
from cotenant.loadgen import llm_profiling
from cotenant.loadgen.llm_profiling import Profiling
from cotenant.loadgen.target import parse_target


def test_no_two_measurements_have_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are not counted, since an engine with a prefix cache would answer the second one too fast."""
    seeds = list[int]()

    def unanswered(test: Any, **_: Any) -> Any:
        seeds.append(test.seed)
        return SimpleNamespace(reasons={"refused": 1})

    monkeypatch.setattr(llm_profiling, "run_openai", unanswered)
    runs = [llm_profiling._Run(Profiling(parse_target("h:1"), "m", run=run)) for run in (1, 2)]
    for run in runs * 2:
        with pytest.raises(WorkError):
            run._send([0.0], [16], [1])
    assert len(set(seeds)) == 4

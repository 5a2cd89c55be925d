"""The networks that the benchmarks run are what they say."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.extras
torch = pytest.importorskip("torch")

from cotenant.bench.networks import resnet50, transformer  # noqa: E402


def test_resnet50_has_its_published_size_and_shapes() -> None:
    net = resnet50(torch).eval()
    # the number for ResNet-50 in He et al., which other libraries also have
    assert sum(p.numel() for p in net.parameters()) == 25_557_032
    assert sum(isinstance(m, torch.nn.Conv2d) for m in net.modules()) == 53
    with torch.no_grad():
        assert net(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_the_transformer_gives_a_logit_for_every_word_of_every_place() -> None:
    net = transformer(torch, width=48, layers=2, heads=4, words=100)
    assert net(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 100)

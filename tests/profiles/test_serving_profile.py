"""Serving profiles: figures worked out by hand, wrong files, the same profile through a file and back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cotenant.core.errors import InputError
from cotenant.profiles.serving.interference_fit import Pair, fit_interference
from cotenant.profiles.serving.latency import Interference, ModelProfile, Partition, ServingProfile
from cotenant.profiles.serving.latency_files import (
    load_profile,
    parse_profile,
    profile_to_dict,
    read_gpulet_dir,
    read_profile,
    shipped_profiles,
)

HALF, WHOLE = Partition(0.5, "50%"), Partition(1.0, "100%")


@pytest.fixture
def small() -> ServingProfile:
    """Two models; effective times can be worked out in the head."""
    a = ModelProfile(
        "a", 100, {"50%": ((1, 10.0), (4, 16.0)), "100%": ((1, 6.0), (4, 9.0))}, ((1, 1.0), (4, 4.0)),
        ((1, 0.2), (4, 0.4)), ((1, 0.1), (4, 0.3)),
    )  # fmt: skip
    b = ModelProfile("b", 200, {"50%": ((1, 20.0), (4, 50.0))}, (), ((1, 0.5), (4, 0.5)), ((1, 0.5), (4, 0.5)))
    return ServingProfile(
        gpu="X", source="made up", memory_bytes=1000, partitions=(HALF, WHOLE), models={"a": a, "b": b},
        interference=Interference(0.1, 0.4, 0.2, 0.6, 1.0), usable=0.9, per_gpulet_bytes=50, margin=1.1,
        aliases={"a2": "a"},
    )  # fmt: skip


def test_interpolates_between_batches_of_one_partition(small: ServingProfile) -> None:
    assert small.latency_ms("a", 2, "50%") == pytest.approx(12.0)
    assert small.latency_ms("a2", 4, "100%") == 9.0
    assert small.overhead_ms("a", 3) == pytest.approx(3.0)


def test_effective_latency_by_hand(small: ServingProfile) -> None:
    # Pressure from b: 0.5 * (0.4 * 0.5 + 0.6 * 0.5) = 0.25. From a itself: 0.5 * (0.1 * 0.2 + 0.2 * 0.1) = 0.02.
    pressure = small.pressure("b", 1, "50%")
    assert pressure == pytest.approx(0.25)
    assert small.alpha("a", 1, "50%", pressure) == pytest.approx(1.27)
    assert small.effective_ms("a", 1, "50%", pressure) == pytest.approx((10 * 1.27 + 1) * 1.1)
    assert small.effective_ms("a", 1, "50%") == pytest.approx(11 * 1.1)


@pytest.mark.parametrize(
    ("model", "batch", "label", "says"),
    [("b", 1, "100%", "not in the profile"), ("a", 5, "50%", "outside the profiled"), ("c", 1, "50%", "absent")],
)
def test_a_missing_cell_is_an_error(small: ServingProfile, model: str, batch: int, label: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        small.latency_ms(model, batch, label)


def test_file_and_back(small: ServingProfile) -> None:
    again = parse_profile(json.loads(json.dumps(profile_to_dict(small))), "x")
    assert again.effective_ms("a", 3, "50%", 0.25) == pytest.approx(small.effective_ms("a", 3, "50%", 0.25))
    assert (again.partitions, again.aliases) == (small.partitions, small.aliases)
    assert again.interference == small.interference


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_mb": "much"}, "memory_mb"),
        ({"partitions": {"150%": 1.5}}, "partitions.150%.fraction"),
        ({"source": None, "gpu": None, "models": None}, "models"),
    ],
)
def test_wrong_profile_names_the_field(small: ServingProfile, change: dict[str, object], field: str) -> None:
    data = {k: v for k, v in {**profile_to_dict(small), **change}.items() if v is not None}
    if "models" in change:
        data.pop("models", None)
        data["gpu"] = data["source"] = "x"
    with pytest.raises(InputError) as caught:
        parse_profile(data, "p.json")
    assert caught.value.field == field
    assert caught.value.file == "p.json"


def test_nan_latency_is_an_error(tmp_path: Path, small: ServingProfile) -> None:
    data = profile_to_dict(small)
    data["models"]["a"]["latency_ms"]["50%"][1] = float("nan")
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="finite"):
        read_profile(tmp_path / "p.json")


def test_gpu_without_profile() -> None:
    with pytest.raises(InputError, match="no serving profile for GPU type 'B200'"):
        load_profile("B200")


def test_shipped_profile_is_the_reference_data(shared: Path) -> None:
    """Ours and the public folder give the same plan times, through two formats."""
    ours = load_profile("RTX 2080 Ti".replace(" ", ""))
    theirs = read_gpulet_dir(shared / "reference" / "gpulet")
    for model in ("lenet1", "vgg16", "ssd-mobilenetv1", "bert"):
        for batch in (1, 3, 17, 32):
            for size in theirs.partitions:
                pressure = theirs.pressure("resnet50", 8, "40%")
                assert ours.effective_ms(model, batch, size.label, pressure) == pytest.approx(
                    theirs.effective_ms(model, batch, size.label, pressure), rel=1e-5
                )


@pytest.mark.parametrize(
    ("line", "says"),
    [("resnet50,20,1,nan", "finite"), ("resnet50,20,1,0", "must be above 0"), ("resnet50,120,1,3", "percentage"),
     ("resnet50,20", "a row is")],
)  # fmt: skip
def test_wrong_latency_csv_names_the_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "latency.csv").write_text(f"model,partition_pct,batch,latency_ms\nresnet50,20,2,5\n{line}\n")
    with pytest.raises(InputError, match=says) as caught:
        read_gpulet_dir(tmp_path)
    assert caught.value.line == 3


def test_fit_finds_the_coefficients_of_made_up_pairs() -> None:
    true = Interference(0.11, 0.7, 0.35, 0.09, 0.93)
    rng = np.random.default_rng(3)
    pairs = []
    for _ in range(400):
        l2, l2o, dram, dramo = rng.random(4)
        p = float(rng.choice([0.2, 0.4, 0.6, 0.8]))
        alpha = true.constant + p * true.own(l2, dram) + (1 - p) * true.other(l2o, dramo)
        pairs.append(Pair(l2, dram, p, l2o, dramo, 1 - p, max(1.0, alpha)))
    found = fit_interference(pairs)
    assert found.model.l2_other == pytest.approx(0.7, abs=0.01)
    assert found.model.dram_self == pytest.approx(0.35, abs=0.01)
    assert found.model.constant == pytest.approx(0.93, abs=0.01)
    assert found.error_p90 < 0.005


def test_fit_needs_enough_pairs() -> None:
    with pytest.raises(InputError, match="at least"):
        fit_interference([Pair(0.1, 0.1, 0.5, 0.1, 0.1, 0.5, 1.1)] * 3)


def test_partitions_keep_their_order(small: ServingProfile) -> None:
    assert replace(small, partitions=tuple(sorted((WHOLE, HALF)))).partitions == (HALF, WHOLE)


FOLDER = {
    "latency.csv": "model,partition_pct,batch,latency_ms\nm,100,1,10\n",
    "utilisation.csv": "bench,batch,ms,sm,l2,mem\nm,1,1,1,20,30\n",
    "interference-constants.csv": "a,b,c,d,e\n0.1,0.7,0.3,0.1,0.9\n",
    "mem-config.json": '{"models": [{"name": "m", "mem": 50}]}',
}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("utilisation.csv", None, "needs utilisation.csv"),
        ("utilisation.csv", "bench,batch,ms,sm,l2,mem\nm,1,1\n", "line 2: has 3 cells"),
        ("interference-constants.csv", "a,b,c,d,e\n", "needs a heading and a row"),
        ("interference-constants.csv", "a,b,c,d,e\n1,2\n", "line 2: has 2 cells"),
        ("mem-config.json", "{", "is not"),
        ("mem-config.json", '{"models": [{"name": "m"}]}', "is not"),
        ("mem-config.json", '{"models": [{"name": "m", "mem": NaN}]}', "is not a memory size"),
        ("latency.csv", "model,partition_pct,batch,latency_ms\nm,100,0.5,10\n", "batch 0.5 is not 1 to"),
        ("latency.csv", "\x00", "latency.csv"),
    ],
)
def test_a_public_folder_that_is_wrong_names_the_file(
    tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    for file, text in (FOLDER | {name: content}).items():
        if text is not None:
            (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_gpulet_dir(tmp_path)


def test_a_public_folder_that_is_whole(tmp_path: Path) -> None:
    for file, text in FOLDER.items():
        (tmp_path / file).write_text(text)
    profile = read_gpulet_dir(tmp_path)
    assert profile.effective_ms("m", 1, "100%", 0.5) == pytest.approx(10 * (0.9 + 0.1 * 0.2 + 0.3 * 0.3 + 0.5) * 1.1)
    assert profile.model("m").memory_bytes == 50e6


@pytest.mark.parametrize("gpu", sorted(shipped_profiles()))
def test_a_shipped_profile_says_where_its_numbers_are_from(gpu: str) -> None:
    """Measured here: card, driver, date and command. Public figures: whose, and at which commit or conference."""
    source = load_profile(gpu).source
    if "measured on" in source:
        assert gpu in source
        assert re.search(r"driver \d+", source)
        assert re.search(r"\d{4}-\d\d-\d\d", source)
        assert "bench/gpu/" in source
    else:
        assert re.search(r"github\.com/\S+ at [0-9a-f]{7}|\(glet, USENIX ATC 2022\)", source)

"""MIG geometry against the placement rules and the published layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.gpus import CATALOG
from cotenant.core.mig import (
    Placement,
    geometry,
    legal_layouts,
    maximal_layouts,
    maximal_multisets,
    multiset,
    parse_layout,
    reachable,
)
from cotenant.core.mig_tables import TABLES

SEVEN = [name for name in TABLES if name not in ("A30", "RTX-PRO-6000")]


@pytest.mark.parametrize("gpu", SEVEN)
def test_counts_of_seven_slice_gpus(gpu: str) -> None:
    plain, double = geometry(gpu, double_memory=False), geometry(gpu, double_memory=True)
    assert (len(maximal_layouts(plain)), len(maximal_multisets(plain))) == (19, 14)
    assert (len(maximal_layouts(double)), len(maximal_multisets(double))) == (78, 38)


def test_counts_of_the_a30_and_defaults() -> None:
    geo = geometry("A30")
    assert (len(maximal_layouts(geo)), len(maximal_multisets(geo))) == (5, 4)
    assert "1g+" not in geometry("A100-40GB").kinds
    assert "1g+" in geometry("A100-80GB").kinds


@pytest.mark.parametrize(
    ("gpu", "double", "key"),
    [("A100-40GB", False, "seven_slice_no_1g2x"), ("H100-80GB", True, "seven_slice_with_1g2x"), ("A30", None, "A30")],
)
def test_every_layout_is_one_of_the_independent_enumeration(
    shared: Path, gpu: str, double: bool | None, key: str
) -> None:
    reference = json.loads((shared / "reference/miso/mig_geometry.json").read_text())[key]["by_multiset"]
    theirs = {layout for layouts in reference.values() for layout in layouts}
    geo = geometry(gpu, double_memory=double)
    mine = {" ".join(f"{p.kind.replace('1g+', '1g2x')}@{p.start}" for p in x) for x in maximal_layouts(geo)}
    assert mine == theirs


def test_every_mig_gpu_of_the_catalog_has_a_table() -> None:
    assert {gpu.mig for gpu in CATALOG.values() if gpu.mig} == set(TABLES)


def test_sm_counts_of_the_h100_are_not_sevenths() -> None:
    sms = {k: p.sms for k, p in geometry("H100-80GB").profiles.items()}
    assert sms == {"7g": 132, "4g": 64, "3g": 60, "2g": 32, "1g+": 26, "1g": 16}
    assert geometry("B200").profiles["7g"].sms is None


def test_layout_syntax() -> None:
    geo = geometry("A100-40GB")
    assert geo.format(parse_layout(geo, "3,2,2")) == "2g.10gb@0,2g.10gb@2,3g.20gb@4"
    assert geo.format(parse_layout(geo, "3,2,1")) == "3g.20gb@0,2g.10gb@4,1g.5gb@6"
    assert parse_layout(geo, "[3, 2, 2]") == parse_layout(geo, "3g 2g 2g") == parse_layout(geo, "3g.20gb,2g.10gb,2g")
    assert parse_layout(geo, "3g.20gb@4,4g.20gb@0") == (Placement(0, "4g"), Placement(4, "3g"))
    double = geometry("H100-80GB")
    assert double.format(parse_layout(double, "1+,3")) == "1g.20gb@0,3g.40gb@4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,3,1", "does not exist on A100-40GB"),
        ("4,4", "does not exist"),
        ("5,2", "has no MIG profile '5'"),
        ("1+", "has no MIG profile '1\\+'"),
        ("3g.20gb@0,2g.10gb@6", "cannot start at 6 on A100-40GB; possible starts are 0, 2, 4"),
        ("3g.20gb@0,2g.10gb@2", "overlap, or together need more than the 7 compute slices or"),
        ("3g.20gb@0,2g", "mixes slices with and without a start"),
        ("3g.20gb@", "'3g.20gb@' has no start on A100-40GB; possible starts are 0, 4"),
        ("3g.40gb@0", "has no MIG profile '3g.40gb'"),
        (" , ", "is empty"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_layout(geometry("A100-40GB"), text)


def test_variants_are_asked_for_by_name_and_chosen_by_no_policy() -> None:
    geo = geometry("H100-80GB")
    assert geo.kinds == ("7g", "4g", "3g", "2g", "1g+", "1g")
    assert geo.format(parse_layout(geo, "3g.40gb,2g.20gb,1g.10gb+me")) == "3g.40gb@0,2g.20gb@4,1g.10gb+me@6"
    assert parse_layout(geo, "1g+me@6") == parse_layout(geo, "1+me@6") == (Placement(6, "1g+me"),)
    with pytest.raises(InputError, match="does not exist"):
        parse_layout(geo, "1g+me,1g+me")  # a GPU has only one instance with media extensions
    with pytest.raises(InputError, match="does not exist"):
        parse_layout(geo, "7g,1g+me")
    assert {geo.format(x) for x in reachable(geo, parse_layout(geo, "3g@0,2g@4,1g+me@6"))} == {
        "3g.40gb@0,2g.20gb@4,1g.10gb+me@6"
    }
    with pytest.raises(InputError, match=r"a part of an instance; give the whole instance, 3g\.40gb"):
        parse_layout(geo, "1c.3g.40gb")
    a30 = geometry("A30")
    with pytest.raises(InputError, match="does not exist"):
        parse_layout(a30, "2g+me,1g+me")  # the GPU has only one optical flow unit


def test_an_rtx_pro_6000_shares_its_four_video_decoders() -> None:
    geo = geometry("RTX-PRO-6000")
    assert geo.kinds == ("4g", "2g", "1g")
    assert geo.format(parse_layout(geo, "2,1,1")) == "2g.48gb@0,1g.24gb@6,1g.24gb@9"
    for legal in ("1g+me.all,1g-me,1g-me,1g-me", "1g+gfx,1g+gfx,1g,1g", "2g+me.all,2g-me", "2g,1g+me,1g+gfx"):
        parse_layout(geo, legal)
    for excluded in ("1g+me.all,1g,1g-me", "2g+me.all,2g", "1g+me.all,1g+me", "1g+me,1g+me", "4g,1g-me"):
        with pytest.raises(InputError, match="does not exist"):
            parse_layout(geo, excluded)


def test_other_names_of_other_drivers() -> None:
    geo = geometry("GB200")
    assert geo.format(parse_layout(geo, "3g.95gb,2g.47gb,1g.24gb+me")) == "3g.93gb@0,2g.47gb@4,1g.23gb+me@6"


def test_a_gpu_without_mig_is_refused() -> None:
    with pytest.raises(InputError, match="V100 has no MIG"):
        geometry("V100")
    with pytest.raises(InputError, match="unknown GPU"):
        geometry("A1000")


def test_reachable_keeps_what_runs() -> None:
    geo = geometry("A100-40GB")
    texts = {geo.format(x) for x in reachable(geo, [Placement(4, "3g"), Placement(0, "2g")])}
    assert texts == {
        "2g.10gb@0,2g.10gb@2,3g.20gb@4",
        "2g.10gb@0,1g.5gb@2,1g.5gb@3,3g.20gb@4",
    }
    assert reachable(geo, []) == maximal_layouts(geo)
    with pytest.raises(InputError, match="not a legal set"):
        reachable(geo, [Placement(0, "4g"), Placement(0, "3g")])


@pytest.mark.parametrize("gpu", ["A30", "A100-40GB", "H100-80GB"])
def test_layouts_obey_slots_and_compute(gpu: str) -> None:
    geo = geometry(gpu)
    for layout in legal_layouts(geo):
        slots = [s for p in layout for s in range(p.start, p.start + geo.profiles[p.kind].memory_slots)]
        assert len(slots) == len(set(slots))
        assert not slots or max(slots) < geo.memory_slots
        assert sum(geo.profiles[p.kind].compute for p in layout) <= geo.compute_slices


@given(st.sampled_from(maximal_layouts(geometry("H100-80GB"))), st.data())
def test_any_part_of_a_layout_is_legal_and_can_grow_back(layout: tuple[Placement, ...], data: st.DataObject) -> None:
    geo = geometry("H100-80GB")
    part = tuple(sorted(data.draw(st.sets(st.sampled_from(layout)))))
    assert part in legal_layouts(geo)
    assert layout in reachable(geo, part)
    assert parse_layout(geo, geo.format(layout)) == layout
    short = ",".join(k.replace("g", "") for k in multiset(geo, layout))
    assert multiset(geo, parse_layout(geo, short)) == multiset(geo, layout)

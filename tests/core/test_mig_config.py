"""mig-parted's configuration files: every rule of the public one has its GPUs, and what is wrong in a file is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cotenant.core.errors import InputError
from cotenant.core.mig import geometry
from cotenant.core.mig_config import named_rules, read_mig_config

# What the public file asks for, as a list: COUNTxPROFILE ... [of PCI devices]. "models" are the GPU models for which it
# was written.
UNIFORM = {
    "A100-40GB": "7x1g.5gb 1x1g.5gb+me 4x1g.10gb 3x2g.10gb 2x3g.20gb 1x4g.20gb 1x7g.40gb",
    "A100-80GB": "7x1g.10gb 1x1g.10gb+me 4x1g.20gb 3x2g.20gb 2x3g.40gb 1x4g.40gb 1x7g.80gb",
    "H100-80GB": "7x1g.10gb 1x1g.10gb+me 4x1g.20gb 3x2g.20gb 2x3g.40gb 1x4g.40gb 1x7g.80gb",
    "A30": "4x1g.6gb 1x1g.6gb+me 2x2g.12gb 1x2g.12gb+me 1x4g.24gb",
    "H100-NVL": "7x1g.12gb 1x1g.12gb+me 4x1g.24gb 1x1g.12gb+me 3x2g.24gb 2x3g.47gb 1x4g.47gb 1x7g.94gb",
    "GH200": "7x1g.12gb 4x1g.24gb 3x2g.24gb 2x3g.48gb 1x4g.48gb 1x7g.96gb",
    "H100-96GB": "7x1g.12gb 4x1g.24gb 3x2g.24gb 2x3g.48gb 1x4g.48gb 1x7g.96gb",
    "H20": "7x1g.12gb 4x1g.24gb 3x2g.24gb 2x3g.48gb 1x4g.48gb 1x7g.96gb",
    "H200": "7x1g.18gb 1x1g.18gb+me 4x1g.35gb 3x2g.35gb 2x3g.71gb 1x4g.71gb 1x7g.141gb",
    "GH200-144GB": "7x1g.18gb 1x1g.18gb+me 4x1g.36gb 3x2g.36gb 2x3g.72gb 1x4g.72gb 1x7g.144gb",
    "B200": "7x1g.23gb 1x1g.23gb+me 4x1g.45gb 3x2g.45gb 2x3g.90gb 1x4g.90gb 1x7g.180gb",
    "GB200": "7x1g.23gb 4x1g.47gb 3x2g.47gb 2x3g.93gb 1x4g.93gb 1x7g.186gb 2x3g.95gb 1x4g.95gb 1x7g.189gb",
    "B300": "7x1g.34gb 1x1g.34gb+me 4x1g.67gb 3x2g.67gb 2x3g.135gb 1x4g.135gb 1x7g.269gb",
    "GB300": "7x1g.35gb 1x1g.35gb+me 4x1g.70gb 3x2g.70gb 2x3g.139gb 1x4g.139gb 1x7g.278gb",
    "RTX-PRO-6000": "4x1g.24gb+gfx 1x1g.24gb+me 1x1g.24gb+me.all 4x1g.24gb-me 2x2g.48gb 2x2g.48gb+gfx 1x2g.48gb+me.all "
    "2x2g.48gb-me 1x4g.96gb 1x4g.96gb+gfx",
}
BALANCED = {
    "0x294110DE": ("GB200", "2x1g.23gb 1x2g.47gb 1x3g.93gb"),
    "0x31C210DE": ("GB300", "2x1g.35gb 1x2g.70gb 1x3g.139gb"),
    "0x2BB510DE": ("RTX-PRO-6000", "2x1g.24gb 1x2g.48gb"),
    "0x290110DE": ("B200", "2x1g.23gb 1x2g.45gb 1x3g.90gb"),
    "0x318210DE": ("B300", "2x1g.34gb 1x2g.67gb 1x3g.135gb"),
    "0x234810DE": ("GH200-144GB", "2x1g.18gb 1x2g.36gb 1x3g.72gb"),
    "0x233510DE": ("H200", "2x1g.18gb 1x2g.35gb 1x3g.71gb"),
    "0x232110DE": ("H100-NVL", "2x1g.12gb 1x2g.24gb 1x3g.47gb"),
    "0x233010DE": ("H100-80GB", "2x1g.10gb 1x2g.20gb 1x3g.40gb"),
    "0x20B010DE": ("A100-40GB", "2x1g.5gb 1x2g.10gb 1x3g.20gb"),
    "0x20B710DE": ("A30", "2x1g.6gb 1x2g.12gb"),
    "0x234210DE": ("GH200", "2x1g.12gb 1x2g.24gb 1x3g.48gb"),
    "0x233D10DE": ("H100-96GB", "2x1g.12gb 1x2g.24gb 1x3g.48gb"),
    "0x232910DE": ("H20", "2x1g.12gb 1x2g.24gb 1x3g.48gb"),
}


def counts(words: str) -> dict[str, int]:
    """`2x1g.10gb 1x2g.20gb` as a mapping."""
    return {name: int(number) for number, name in re.findall(r"(\d)x(\S+)", words)}


def write(path: Path, lists: dict[str, list[dict[str, object]]], version: str = "v1") -> Path:
    path.write_text(yaml.safe_dump({"version": version, "mig-configs": lists}))
    return path


@pytest.mark.parametrize("model", UNIFORM)
def test_every_uniform_rule_fits_the_gpu_it_was_written_for(model: str, tmp_path: Path) -> None:
    rows = {f"all-{i}": counts(word) for i, word in enumerate(UNIFORM[model].split())}
    rules = {name: [{"devices": "all", "mig-enabled": True, "mig-devices": row}] for name, row in rows.items()}
    found = read_mig_config(write(tmp_path / "config.yaml", rules))
    for name, row in rows.items():
        (rule,) = found[name]
        layout = rule.layout(geometry(model, double_memory=True))
        assert len(layout) == sum(row.values()), row
        fit, problem = rule.models()
        assert model in fit
        assert problem == ""


def test_balanced_rules_are_told_apart_by_their_device(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"device-filter": [pci], "devices": "all", "mig-enabled": True, "mig-devices": counts(words)}
        for pci, (_, words) in BALANCED.items()
    ]
    found = read_mig_config(write(tmp_path / "config.yaml", {"all-balanced": rows}))["all-balanced"]
    for rule, (pci, (model, _)) in zip(found, BALANCED.items(), strict=True):
        assert rule.models() == ([model], ""), pci
        assert [other for other in BALANCED if rule.addresses(3, int(other, 16))] == [pci]


def test_modes_devices_and_ids_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "version: v1\nmig-configs:\n"
        "  all-disabled:\n    - devices: all\n      mig-enabled: false\n"
        "  all-enabled:\n    - {devices: all, mig-enabled: true, mig-devices: {}}\n"
        "  some:\n    - {devices: [0, 2], device-filter: 0x20B710DE, mig-enabled: true, mig-devices: {1g.6gb: 4}}\n"
    )
    lists = read_mig_config(path)
    (off,), (on,), (some,) = lists.values()
    assert (off.enabled, off.profiles, on.enabled, on.profiles) == (False, {}, True, {})
    assert [i for i in range(4) if some.addresses(i, 0x20B710DE)] == [0, 2]
    assert not some.addresses(0, 0x20B010DE)
    assert named_rules(lists, "some", path) == (some,)
    with pytest.raises(InputError, match="has no list 'other'; its lists are all-disabled, all-enabled, some"):
        named_rules(lists, "other", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2\nmig-configs: {}\n", "config.yaml, line 1, .*is 'v2'; only v1 is supported"),
        ("version: v1\n", "needs at least one list"),
        ("version: v1\nmig-configs: {a: []}\n", "a: needs at least one rule"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: some, mig-enabled: true}\n", "line 4, .*is 'some'; must be"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: [-1], mig-enabled: true}\n", "must be all, or a list"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: 1}\n", "is 1, not true or false"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: all}\n", "is None, not true or false"),
        (
            "version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: true, mig-devices: [1]}\n",
            "must map profiles",
        ),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: false, mig-devices: {7g: 1}}\n", "is false"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: true, mig-device: {}}\n", "'mig-device'"),
        ("version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: true, device-filter: H}\n", "'H' is not"),
        ("version: v1\nother: {}\n", "may only contain version"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as wrong:
        read_mig_config(path)
    assert "\n" not in str(wrong.value)


def test_a_rule_that_no_gpu_can_have_says_why(tmp_path: Path) -> None:
    rules: dict[str, list[dict[str, object]]] = {
        "too-many": [{"devices": "all", "mig-enabled": True, "mig-devices": {"3g.40gb": 3}}],
        "elsewhere": [
            {"devices": "all", "device-filter": "0x20B710DE", "mig-enabled": True, "mig-devices": {"1g.5gb": 1}}
        ],
        "thousands": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 5000}}],
        "divided": [{"devices": "all", "mig-enabled": True, "mig-devices": {"3g.20gb": 1, "1c.3g.20gb": 2}}],
        "future": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb+me.all": 1}}],
    }
    found = read_mig_config(write(tmp_path / "config.yaml", rules))
    assert found["too-many"][0].models() == ([], "no GPU model of the catalog supports it")
    assert found["thousands"][0].models() == ([], "no GPU model of the catalog supports it")
    divided = "no GPU model of the catalog has the profile '1c.3g.20gb': it names a compute instance; only whole"
    assert found["divided"][0].models()[1].startswith(divided)
    assert found["future"][0].models() == ([], "no GPU model of the catalog has the profile '1g.10gb+me.all'")
    assert "A30 has no MIG profile '1g.5gb'" in found["elsewhere"][0].models()[1]

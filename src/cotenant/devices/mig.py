"""MIG layouts on a real GPU: what there is, what has to change for a layout, and making it so.

`apply` compares the layout with what exists and does only the difference, so a run that was interrupted anywhere is
finished, or undone, by the next one. Instances that the layout keeps are never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.mig import Geometry, Layout, Placement, parse_layout
from cotenant.devices.nvml import GpuInstance, Nvml, NvmlCallError, NvmlGpu

Say = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """What has to be done for a layout: instances to destroy, to create, and to give a missing compute instance."""

    keep: tuple[GpuInstance, ...]
    destroy: tuple[GpuInstance, ...]
    fill: tuple[GpuInstance, ...]
    create: tuple[Placement, ...]

    @property
    def empty(self) -> bool:
        return not (self.destroy or self.fill or self.create)

    def steps(self, geo: Geometry) -> list[str]:
        """In words, in the order they are done."""
        return [
            *(f"destroy {geo.name(g.placement)} (instance {g.id})" for g in self.destroy),
            *(f"complete {geo.name(g.placement)} (instance {g.id} has no compute instance)" for g in self.fill),
            *(f"create {geo.name(p)}" for p in self.create),
        ]


def difference(layout: Layout, existing: list[GpuInstance]) -> Change:
    """The change from what exists to a layout; larger instances are created first."""
    wanted = set(layout)
    keep = tuple(g for g in existing if g.placement in wanted and len(g.compute_ids) == 1)
    fill = tuple(g for g in existing if g.placement in wanted and not g.compute_ids)
    spared = {g.id for g in (*keep, *fill)}
    destroy = tuple(g for g in existing if g.id not in spared)
    have = {g.placement for g in (*keep, *fill)}
    order = {kind: i for i, kind in enumerate(("7g", "4g", "3g", "2g", "1g+", "1g"))}
    create = tuple(sorted(wanted - have, key=lambda p: (order[p.kind], p.start)))
    return Change(keep, destroy, fill, create)


def _open(nvml: Nvml, gpu: str) -> tuple[NvmlGpu, Geometry]:
    device = nvml.find(gpu)
    on, pending = nvml.mode(device)
    if not on:
        wait = "waits for a GPU reset" if pending else f"is off; `cotenant mig enable --gpu {device.uuid}` turns it on"
        raise WorkError(f"MIG on GPU {device.index} {wait}")
    return device, nvml.geometry(device)


def _refuse_if_used(nvml: Nvml, device: NvmlGpu, change: Change, *, beside_running: bool) -> None:
    running = nvml.processes(device)
    if beside_running:
        doomed = {g.id for g in change.destroy} | {g.id for g in change.fill}
        running = {pid: where for pid, where in running.items() if where is None or where in doomed}
    if running:
        pids = ", ".join(str(p) for p in sorted(running)[:8])
        hint = "" if beside_running else "; --beside-running changes only instances that nobody uses"
        raise WorkError(f"GPU {device.index} runs process {pids}: stop it first{hint}")


def apply(
    nvml: Nvml, gpu: str, text: str, *, dry_run: bool = False, beside_running: bool = False, say: Say = lambda _: None
) -> dict[str, Any]:
    """Give a GPU a layout. Returns what was, or with `dry_run` would be, done and the instances afterwards.

    Raises InputError for a layout this GPU does not have, WorkError when it is in use or the driver refuses.
    """
    device, geo = _open(nvml, gpu)
    layout = parse_layout(geo, text)
    change = difference(layout, nvml.instances(device, geo))
    result: dict[str, Any] = {
        "gpu": device.uuid, "name": device.name, "layout": geo.format(layout), "steps": change.steps(geo),
        "dry_run": dry_run,
    }
    if not change.empty:
        _refuse_if_used(nvml, device, change, beside_running=beside_running)
    if dry_run:
        return result
    for instance in change.destroy:
        say(f"destroying {geo.name(instance.placement)}")
        nvml.destroy(device, instance.id)
    for instance in change.fill:
        say(f"completing {geo.name(instance.placement)}")
        nvml.fill(device, instance.id, instance.placement.kind)
    for place in change.create:
        say(f"creating {geo.name(place)}")
        nvml.fill(device, nvml.create(device, geo.profiles[place.kind], place.start), place.kind)
    left = difference(layout, nvml.instances(device, geo))
    if not left.empty:
        raise WorkError(f"GPU {device.index} still needs: {'; '.join(left.steps(geo))}; run apply again")
    result["instances"] = describe(nvml, device, geo)
    return result


def reset(nvml: Nvml, gpu: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Destroy every instance of a GPU; refuses while processes run on it."""
    device, geo = _open(nvml, gpu)
    change = difference((), nvml.instances(device, geo))
    if not change.empty:
        _refuse_if_used(nvml, device, change, beside_running=False)
    if not dry_run:
        for instance in change.destroy:
            nvml.destroy(device, instance.id)
    return {"gpu": device.uuid, "name": device.name, "steps": change.steps(geo), "dry_run": dry_run}


def set_mode(nvml: Nvml, gpu: str, on: bool, *, dry_run: bool = False) -> dict[str, Any]:
    """Turn MIG on or off; off needs a GPU without instances. Refuses while processes run on it.

    A switch the other way that still waits for a GPU reset is taken back.
    """
    device = nvml.find(gpu)
    now, pending = nvml.mode(device)
    changed = (now, pending) != (on, on)
    result = {
        "gpu": device.uuid, "name": device.name, "mig": on, "changed": changed, "reset_needed": False,
        "dry_run": dry_run,
    }
    if not changed:
        return result
    running = nvml.processes(device) if now != on else {}
    if running:
        raise WorkError(f"GPU {device.index} runs process {', '.join(map(str, sorted(running)))}: stop it first")
    if now and not on and nvml.instances(device, nvml.geometry(device)):
        raise WorkError(f"GPU {device.index} has MIG instances; `cotenant mig reset --gpu {device.uuid}` removes them")
    if not dry_run:
        result["reset_needed"] = not nvml.set_mode(device, on)
    return result


def describe(nvml: Nvml, device: NvmlGpu, geo: Geometry) -> list[dict[str, Any]]:
    """The instances of a GPU as rows: profile, start, ids and the UUID to put into CUDA_VISIBLE_DEVICES."""
    return [
        {
            "profile": g.name, "start": g.placement.start, "instance_id": g.id, "uuid": g.uuid,
            "memory_bytes": geo.profiles[g.placement.kind].memory_bytes, "sms": geo.profiles[g.placement.kind].sms,
        }
        for g in nvml.instances(device, geo)
    ]


def export(nvml: Nvml, gpu: str | None = None) -> dict[str, Any]:
    """Every GPU (or one) with its MIG mode and the table of its instances and their UUIDs."""
    devices = nvml.devices() if gpu is None else [nvml.find(gpu)]
    rows = []
    for device in devices:
        on = _mode_or_none(nvml, device)
        geo = nvml.geometry(device) if on else None
        rows.append({
            "index": device.index, "uuid": device.uuid, "name": device.name, "mig": on,
            "instances": [] if geo is None else describe(nvml, device, geo),
        })
    return {"gpus": rows}


def _mode_or_none(nvml: Nvml, device: NvmlGpu) -> bool | None:
    """MIG mode, None for a GPU without MIG."""
    try:
        return nvml.mode(device)[0]
    except NvmlCallError as error:
        if error.code == "NVML_ERROR_NOT_SUPPORTED":
            return None
        raise

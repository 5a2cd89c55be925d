"""Changes the MIG instances of a GPU to a given layout.

`apply` compares the layout with the existing instances and changes only what differs, so that a second run finishes
what an interrupted run has begun. Instances that are part of the layout are not touched. If the driver refuses a step,
the previous instances are created again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Geometry, Layout, Placement, geometry, parse_layout
from cotenant.core.mig_config import Rule
from cotenant.core.mig_tables import PCI_MODELS
from cotenant.devices.nvml import GpuInstance, Nvml, NvmlCallError, NvmlGpu

Say = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """What must be changed to get a layout of MIG instances. `fill`: GPU instances that lack a compute instance."""

    keep: tuple[GpuInstance, ...]
    destroy: tuple[GpuInstance, ...]
    fill: tuple[GpuInstance, ...]
    create: tuple[Placement, ...]

    @property
    def empty(self) -> bool:
        return not (self.destroy or self.fill or self.create)

    def steps(self, geo: Geometry) -> list[str]:
        """The steps of the change of the layout in words, in order."""
        return [
            *(f"destroy {_whole_name(g)}" for g in self.destroy),
            *(f"complete {g} (instance {g.id} has no compute instance)" for g in self.fill),
            *(f"create {geo.name(p)}" for p in self.create),
        ]


def _whole_name(instance: GpuInstance) -> str:
    """Name a GPU instance in a message: with its id, and with the number of its compute instances if it is divided."""
    divided = f" with {len(instance.compute_ids)} compute instances" if len(instance.compute_ids) > 1 else ""
    return f"{instance} (instance {instance.id}{divided})"


def _slices(place: Placement) -> int:
    """Number of compute slices of an instance: the digit with which its kind begins (3 for `3g`). 0 if the driver does
    not describe the instance's profile, because its kind then begins with no digit.
    """
    return int(place.kind[0]) if place.kind[0].isdigit() else 0


def difference(layout: Layout, existing: list[GpuInstance], untouched: AbstractSet[int] = frozenset()) -> Change:
    """The change from the existing instances to a layout; larger instances are created first.

    `untouched`: ids of instances that stay as they are, although they are divided or have no compute instance.
    """
    wanted = set(layout)
    keep = tuple(g for g in existing if g.placement in wanted and (len(g.compute_ids) == 1 or g.id in untouched))
    fill = tuple(g for g in existing if g.placement in wanted and not g.compute_ids and g.id not in untouched)
    spared = {g.id for g in (*keep, *fill)}
    destroy = tuple(g for g in existing if g.id not in spared)
    have = {g.placement for g in (*keep, *fill)}
    create = tuple(sorted(wanted - have, key=lambda p: (-_slices(p), p.kind != "1g+", p.start)))
    return Change(keep, destroy, fill, create)


def _open(nvml: Nvml, gpu: str) -> tuple[NvmlGpu, Geometry]:
    device = nvml.find(gpu)
    on, pending = nvml.mode(device)
    if not on:
        wait = "waits for a GPU reset" if pending else f"is off; `cotenant mig enable --gpu {device.uuid}` turns it on"
        raise WorkError(f"MIG on GPU {device.index} {wait}")
    return device, nvml.geometry(device)


def _refuse_if_used(nvml: Nvml, device: NvmlGpu, change: Change, *, beside_running: bool | None) -> None:
    """Raise WorkError if processes run on the GPU, or, with `beside_running`, on an instance that is to be changed.
    `beside_running` is None if the command has no option of that name, so that the message does not name it.
    """
    running = nvml.processes(device)
    if beside_running:
        doomed = {g.id for g in change.destroy} | {g.id for g in change.fill}
        running = {pid: where for pid, where in running.items() if where is None or where in doomed}
    if running:
        names = {g.id: str(g) for g in (*change.keep, *change.destroy, *change.fill)}
        pids = ", ".join(
            f"{pid} on {names[where]}" if where in names else str(pid) for pid, where in sorted(running.items())[:8]
        )
        hint = "" if beside_running is not False else "; --beside-running changes only instances that are not in use"
        raise WorkError(f"GPU {device.index} runs process {pids}: stop it first{hint}")


def _refuse_if_runs(nvml: Nvml, device: NvmlGpu) -> None:
    if running := nvml.processes(device):
        raise WorkError(f"GPU {device.index} runs process {', '.join(map(str, sorted(running)))}: stop it first")


def _carry_out(nvml: Nvml, device: NvmlGpu, geo: Geometry, change: Change, say: Say) -> None:
    for instance in change.destroy:
        say(f"destroying {instance}")
        nvml.destroy(device, instance.id)
    for instance in change.fill:
        say(f"completing {instance}")
        nvml.fill(device, instance.id)
    for place in change.create:
        say(f"creating {geo.name(place)}")
        profile = geo.every.get(place.kind)
        if profile is None:
            raise WorkError(f"the driver does not describe {geo.name(place)}, so that it cannot be created")
        nvml.fill(device, nvml.create(device, profile, place.start))


def _put_back(nvml: Nvml, device: NvmlGpu, geo: Geometry, before: list[GpuInstance], say: Say) -> str:
    """Create the previous instances again after a step has failed. Returns the outcome in words."""
    try:
        now = nvml.instances(device, geo)
        as_before = {(g.id, g.compute_ids) for g in before}
        untouched = {g.id for g in now if (g.id, g.compute_ids) in as_before}
        back = difference(tuple(g.placement for g in before), now, untouched)
        if back.empty:
            return "nothing was changed"
        _carry_out(nvml, device, geo, back, say)
    except WorkError as error:
        left = ", ".join(map(str, nvml.instances(device, geo))) or "no instance"
        was = ", ".join(map(str, before)) or "no instance"
        return f"the GPU had {was}, which could not be created again ({error}); it now has {left}"
    made = {g.placement for g in back.fill} | set(back.create)
    whole = ", ".join(str(g) for g in before if g.placement in made and len(g.compute_ids) > 1)
    lost = f"; {whole} had several compute instances and has one now" if whole else ""
    return "the previous instances exist again" + (", with new UUIDs" if back.create else "") + lost


def apply(
    nvml: Nvml, gpu: str, text: str, *, dry_run: bool = False, beside_running: bool = False, say: Say = lambda _: None
) -> dict[str, Any]:
    """Change a GPU's instances to a layout. Returns the steps, and unless `dry_run` the instances afterwards.

    Raises InputError for a layout that this GPU does not have, WorkError if the GPU is in use or the driver refuses.
    """
    device, geo = _open(nvml, gpu)
    layout = parse_layout(geo, text)
    before = nvml.instances(device, geo)
    change = difference(layout, before)
    result: dict[str, Any] = {
        "gpu": device.uuid,
        "name": device.name,
        "layout": geo.format(layout),
        "steps": change.steps(geo),
        "dry_run": dry_run,
    }
    if not change.empty:
        _refuse_if_used(nvml, device, change, beside_running=beside_running)
    if dry_run:
        return result
    try:
        _carry_out(nvml, device, geo, change, say)
    except WorkError as error:
        raise WorkError(f"{error}; {_put_back(nvml, device, geo, before, say)}") from None
    left = difference(layout, nvml.instances(device, geo))
    if not left.empty:
        raise WorkError(f"GPU {device.index} still needs: {'; '.join(left.steps(geo))}; run apply again")
    result["instances"] = describe(nvml, device, geo)
    return result


def reset(nvml: Nvml, gpu: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Destroy all MIG instances of a GPU. Raises WorkError if processes run on it, or if instances are left."""
    device, geo = _open(nvml, gpu)
    change = difference((), nvml.instances(device, geo))
    if not change.empty:
        _refuse_if_used(nvml, device, change, beside_running=None)
    if not dry_run:
        why = ""
        for instance in change.destroy:
            try:
                nvml.destroy(device, instance.id)
            except WorkError as error:
                why = why or f": {error}"
        if left := nvml.instances(device, geo):
            raise WorkError(f"GPU {device.index} still has {', '.join(map(str, left))}{why}")
    return {"gpu": device.uuid, "name": device.name, "steps": change.steps(geo), "dry_run": dry_run}


def apply_rules(
    nvml: Nvml,
    rules: Sequence[Rule],
    gpu: str | None = None,
    *,
    dry_run: bool = False,
    beside_running: bool = False,
    say: Say = lambda _: None,
) -> list[dict[str, Any]]:
    """Apply the rules of a mig-parted configuration to the GPUs of this machine, or to the GPU `gpu`.

    All GPUs are checked before the first is changed. Raises InputError, WorkError.
    """
    devices = nvml.devices() if gpu is None else [nvml.find(gpu)]
    ids = {device.uuid: nvml.pci_id(device) for device in devices}
    addressed = [(d, [rule for rule in rules if rule.addresses(d.index, ids[d.uuid])]) for d in devices]
    todo = [(device, mine[-1]) for device, mine in addressed if mine]
    if not todo:
        there = " or ".join(f"GPU {d.index} ({d.name}, {ids[d.uuid]:#010x})" for d in devices)
        raise InputError(f"no rule of the configuration applies to {there}", field="device-filter")
    for device, rule in todo:
        _refuse_rule(rule, ids[device.uuid])
    for dry in (True, False)[: 1 if dry_run else 2]:
        done: list[dict[str, Any]] = []
        for device, rule in todo:
            try:
                steps = _follow(nvml, device, rule, dry, beside_running, say)
            except WorkError as error:
                changed = [str(d.index) for (d, _), row in zip(todo, done, strict=False) if row["steps"] and not dry]
                if not changed:
                    raise
                raise WorkError(f"{error}; the rules have already been applied to GPU {', '.join(changed)}") from None
            done.append({"gpu": device.uuid, "name": device.name, "dry_run": dry, "steps": steps})
    return done


def _refuse_rule(rule: Rule, pci_id: int) -> None:
    """Raise InputError if the GPU with this PCI id cannot have the layout of a rule, according to the catalog of GPU
    models. The driver itself would refuse the layout only after MIG was turned on. GPUs that the catalog does not have
    are not checked.
    """
    model = PCI_MODELS.get(pci_id >> 16)
    if model is not None:
        rule.layout(geometry(model, double_memory=True))


def _follow(nvml: Nvml, device: NvmlGpu, rule: Rule, dry_run: bool, beside_running: bool, say: Say) -> list[str]:
    """Apply a rule to one GPU, unless `dry_run`. Returns the steps in words."""
    now = _mode_or_none(nvml, device)
    if not rule.enabled and now is None:
        return []  # a rule may turn MIG off on all GPUs, as in mig-parted's list all-disabled; some do not have MIG
    if not rule.enabled and not now:
        back = set_mode(nvml, device.uuid, False, dry_run=dry_run)["changed"]
        return ["cancel turning MIG on"] if back else []
    if now:
        return _follow_with_mig(nvml, device, rule, dry_run, beside_running, say)
    done = set_mode(nvml, device.uuid, True, dry_run=dry_run)
    if dry_run:
        return ["turn MIG on", *([f"create {rule}"] if rule.profiles else [])]
    if done["reset_needed"]:
        raise WorkError(f"MIG on GPU {device.index} waits for a GPU reset")
    try:
        return ["turn MIG on", *_follow_with_mig(nvml, device, rule, dry_run, beside_running, say)]
    except (InputError, WorkError) as error:
        try:
            off = not set_mode(nvml, device.uuid, False)["reset_needed"]
        except WorkError:
            off = False
        raise WorkError(f"{error}; MIG on GPU {device.index} is {'off again' if off else 'on now'}") from None


def _follow_with_mig(
    nvml: Nvml, device: NvmlGpu, rule: Rule, dry_run: bool, beside_running: bool, say: Say
) -> list[str]:
    """Apply a rule to a GPU whose MIG mode is on, unless `dry_run`. Returns the steps in words."""
    steps: list[str] = []
    if rule.profiles:
        geo = nvml.geometry(device)
        text = geo.format(rule.layout(geo, [g.placement for g in nvml.instances(device, geo)]))
        steps += apply(nvml, device.uuid, text, dry_run=dry_run, beside_running=beside_running, say=say)["steps"]
    else:
        steps += reset(nvml, device.uuid, dry_run=dry_run)["steps"]
    if not rule.enabled:
        steps.append("turn MIG off")
        _refuse_if_runs(nvml, device)
        if not dry_run:
            set_mode(nvml, device.uuid, False)
    return steps


def set_mode(nvml: Nvml, gpu: str, on: bool, *, dry_run: bool = False) -> dict[str, Any]:
    """Turn MIG mode on or off. Raises WorkError if processes run on the GPU, or if MIG is to be turned off while there
    are instances.

    If the opposite switch still waits for a GPU reset, it is cancelled.
    """
    device = nvml.find(gpu)
    now, pending = nvml.mode(device)
    changed = (now, pending) != (on, on)
    result = {
        "gpu": device.uuid,
        "name": device.name,
        "mig": on,
        "changed": changed,
        "reset_needed": False,
        "dry_run": dry_run,
    }
    if not changed:
        return result
    if now != on:
        _refuse_if_runs(nvml, device)
    if now and not on and (there := nvml.instances(device, nvml.geometry(device))):
        raise WorkError(
            f"GPU {device.index} has MIG instances, {', '.join(map(str, there))}; "
            f"`cotenant mig reset --gpu {device.uuid}` removes them"
        )
    if not dry_run:
        result["reset_needed"] = not nvml.set_mode(device, on)
    return result


def describe(nvml: Nvml, device: NvmlGpu, geo: Geometry) -> list[dict[str, Any]]:
    """The MIG instances of a GPU: profile, start, id, sizes, and the UUIDs for CUDA_VISIBLE_DEVICES.

    `uuids` has one UUID for each compute instance, and `uuid` is the first of them.
    """
    rows = []
    for g in nvml.instances(device, geo):
        profile = geo.every.get(g.placement.kind)
        rows.append(
            {
                "profile": g.name,
                "start": g.placement.start,
                "instance_id": g.id,
                "uuid": g.uuid,
                "uuids": list(g.uuids),
                "memory_bytes": profile and profile.memory_bytes,
                "sms": profile and profile.sms,
            }
        )
    return rows


def export(nvml: Nvml, gpu: str | None = None) -> dict[str, Any]:
    """All GPUs, or the GPU `gpu`, with their MIG modes and instances."""
    devices = nvml.devices() if gpu is None else [nvml.find(gpu)]
    rows = []
    for device in devices:
        on = _mode_or_none(nvml, device)
        geo = nvml.geometry(device) if on else None
        rows.append(
            {
                "index": device.index,
                "uuid": device.uuid,
                "name": device.name,
                "mig": on,
                "instances": [] if geo is None else describe(nvml, device, geo),
            }
        )
    return {"gpus": rows}


def _mode_or_none(nvml: Nvml, device: NvmlGpu) -> bool | None:
    """Whether MIG mode is on; None for a GPU without MIG."""
    try:
        return nvml.mode(device)[0]
    except NvmlCallError as error:
        if error.code == "NVML_ERROR_NOT_SUPPORTED":
            return None
        raise

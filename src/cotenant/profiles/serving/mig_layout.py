"""Places the MIG instances of a serving plan on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cotenant.core.errors import InputError
from cotenant.core.mig import Geometry, Placement, geometry, place
from cotenant.profiles.serving.latency import ServingProfile

# the geometry of this GPU is used for every GPU with seven compute slices that the catalog does not have
SEVEN_SLICES = "A100-80GB"


def mig_geometry(profile: ServingProfile) -> Geometry | None:
    """Return the geometry that limits a profile's MIG instances; None without instances, or for kinds that no GPU has.
    """
    if not profile.slots:
        return None
    try:
        geo = geometry(profile.gpu, double_memory=True)
    except InputError:  # the catalog has no GPU of this name
        geo = geometry(SEVEN_SLICES, double_memory=True)
    known = geo.memory_slots == profile.slots and all(
        p.instance in geo.profiles and geo.profiles[p.instance].memory_slots == p.slots
        for p in profile.partitions if p.instance
    )  # fmt: skip
    return geo if known else None


def starts(profile: ServingProfile, kinds: Sequence[str]) -> list[int]:
    """Return the first memory slot of each of these instances of one GPU. If `mig_geometry` knows no geometry for the
    profile, the instances follow each other, beginning with the largest.
    """
    geo = mig_geometry(profile)
    slots = {p.instance: p.slots for p in profile.partitions}
    order = sorted(range(len(kinds)), key=lambda i: -slots[kinds[i]])
    if geo is not None:
        layout = place(geo, [kinds[i] for i in order])
        assert layout is not None, kinds
        free = {kind: [p.start for p in layout if p.kind == kind] for kind in kinds}
        return [free[kind].pop(0) for kind in kinds]
    out, at = [0] * len(kinds), 0
    for i in order:
        out[i], at = at, at + slots[kinds[i]]
    return out


def fits(profile: ServingProfile, instances: Iterable[tuple[int, str]]) -> bool:
    """Whether instances, (first memory slot, kind) each, may exist together on one GPU."""
    geo = mig_geometry(profile)
    if geo is not None:
        return geo.fits(Placement(start, kind) for start, kind in instances)
    slots = {p.instance: p.slots for p in profile.partitions}
    taken = sorted((start, start + slots[kind]) for start, kind in instances)
    ends = [0, *(end for _, end in taken)]
    return all(start >= end for (start, _), end in zip(taken, ends, strict=False)) and ends[-1] <= profile.slots

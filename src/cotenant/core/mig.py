"""MIG geometry: profiles, placements, layouts, and the layouts that a GPU with running instances can still reach.

A GPU has `compute_slices` and `memory_slots`; an instance takes a number of compute slices and a range of memory slots
that begins at one of the starts allowed for its kind. A set of instances is legal if their ranges are disjoint and the
compute slices suffice. A layout is maximal if no further instance fits.

Profiles that differ from another only in media engines or graphics (`1g+me`, `2g-me`, `1g+gfx`) are variants: they can
be requested, listed and removed, but policies do not choose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.mig_tables import GIB, TABLES


@dataclass(frozen=True, slots=True)
class SliceProfile:
    """A kind of instance on one GPU: `kind` (7g, 4g, 3g, 2g, 1g+, 1g), full `name`, memory and SMs (None: unknown).

    `1g+` is a 1g with twice the memory. `most`: largest number of such instances on a GPU; `engines`: video decoders
    and optical flow units of an instance.
    """

    kind: str
    name: str
    profile_id: int
    compute: int
    memory_slots: int
    memory_bytes: int
    sms: int | None
    starts: tuple[int, ...]
    most: int = 8
    engines: tuple[int, int] = (0, 0)
    also: str = ""  # the name that other driver versions use for the profile


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """One MIG instance: its start on the memory-slot axis and its kind."""

    start: int
    kind: str

    def __str__(self) -> str:
        """Return the notation `3g@4`, which `parse_placement` reads."""
        return f"{self.kind}@{self.start}"


def parse_placement(text: str) -> Placement:
    """Parse a placement such as `3g@4`. Raises InputError for anything else."""
    kind, _, start = text.partition("@")
    if not (kind and start.isdecimal()):
        raise InputError(f"{text!r} is not a slice and its start, such as 3g@4", field="slice")
    return Placement(int(start), kind)


Layout = tuple[Placement, ...]  # the MIG instances of a GPU, in the order of their places
Multiset = tuple[str, ...]  # the kinds of a GPU's instances without their places, largest first


@dataclass(frozen=True)
class Geometry:
    """The MIG geometry of one GPU model; `kinds`: kinds without variants, from the largest to the smallest."""

    gpu: str
    compute_slices: int
    memory_slots: int
    profiles: dict[str, SliceProfile]
    source: str
    variants: dict[str, SliceProfile] = field(default_factory=dict)
    engines: tuple[int, int] = (0, 0)

    def __hash__(self) -> int:
        return hash(self.gpu)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.profiles)

    @property
    def every(self) -> dict[str, SliceProfile]:
        """Return all profiles of MIG instances, including variants."""
        return self.profiles | self.variants

    @property
    def whole(self) -> Layout:
        """Return the layout with one instance of the whole GPU (7g, or 4g on an A30)."""
        return (Placement(0, self.kinds[0]),)

    def placements(self) -> tuple[Placement, ...]:
        """Return every placement of a single instance, by kind, then start."""
        return tuple(Placement(s, p.kind) for p in self.profiles.values() for s in p.starts)

    def fits(self, layout: Iterable[Placement]) -> bool:
        """Whether these instances can exist together on one GPU."""
        taken = compute = decoders = flow = 0
        count: dict[str, int] = {}
        for placement in layout:
            profile = self.profiles.get(placement.kind) or self.variants.get(placement.kind)
            if profile is None or placement.start not in profile.starts:
                return False
            bits = ((1 << profile.memory_slots) - 1) << placement.start
            compute += profile.compute
            if taken & bits or compute > self.compute_slices:
                return False
            taken |= bits
            decoders, flow = decoders + profile.engines[0], flow + profile.engines[1]
            count[placement.kind] = count.get(placement.kind, 0) + 1
            if count[placement.kind] > profile.most:
                return False
        return decoders <= self.engines[0] and flow <= self.engines[1]

    def name(self, placement: Placement) -> str:
        """`3g.40gb@0`."""
        profile = self.every.get(placement.kind)
        return f"{profile.name if profile else placement.kind}@{placement.start}"

    def format(self, layout: Iterable[Placement]) -> str:
        """Return the layout in full notation, `3g.40gb@0,2g.20gb@4`."""
        return ",".join(self.name(p) for p in sorted(layout))


@cache
def geometry(gpu: str, *, double_memory: bool | None = None) -> Geometry:
    """Return the MIG geometry of a GPU of the catalog; `double_memory` overrides whether the double-memory 1g is
    offered.

    Raises InputError for a GPU without MIG.
    """
    key = find_gpu(gpu, field="gpu").mig
    if key is None:
        raise InputError(f"{gpu} has no MIG; GPUs with MIG: {', '.join(TABLES)}", field="gpu")
    table = TABLES[key]
    offered = table.double_memory if double_memory is None else double_memory
    profiles: dict[str, SliceProfile] = {}
    variants: dict[str, SliceProfile] = {}
    rows = {row.kind: row for row in table.rows}
    for kind, shape in table.shapes.items():
        row = rows.get(kind) or rows[kind[:2]]
        suffix = kind.removeprefix(row.kind)
        if kind == "1g+" and not offered:
            continue
        (variants if suffix else profiles)[kind] = SliceProfile(
            kind,
            row.name + suffix,
            shape.profile_id,
            shape.compute,
            shape.memory_slots,
            int(row.memory_gib * GIB),
            row.sms,
            shape.starts,
            shape.most,
            shape.engines,
            row.also and row.also + suffix,
        )
    offers = [shape.engines for shape in table.shapes.values()]
    engines = (max(e[0] for e in offers), max(e[1] for e in offers))
    return Geometry(key, table.compute_slices, table.memory_slots, profiles, table.source, variants, engines)


@cache
def legal_layouts(geo: Geometry) -> tuple[Layout, ...]:
    """Return every legal set of instances including the empty one, each sorted by start; smaller sets first."""
    options = geo.placements()
    found: set[Layout] = set()

    def grow(layout: Layout, index: int) -> None:
        found.add(tuple(sorted(layout)))
        for i in range(index, len(options)):
            wider = (*layout, options[i])
            if geo.fits(wider):
                grow(wider, i + 1)

    grow((), 0)
    return tuple(sorted(found, key=lambda x: (len(x), x)))


@cache
def maximal_layouts(geo: Geometry) -> tuple[Layout, ...]:
    """Return the placed layouts to which no instance can be added (19 on a seven-slice GPU, 78 with the double-memory
    1g).
    """
    options = geo.placements()
    return tuple(
        layout
        for layout in legal_layouts(geo)
        if layout and not any(geo.fits((*layout, extra)) for extra in options if extra not in layout)
    )


def multiset(geo: Geometry, layout: Iterable[Placement]) -> Multiset:
    """Return the kinds of a layout without placements, largest first."""
    order = {kind: i for i, kind in enumerate(geo.every)}
    return tuple(sorted((p.kind for p in layout), key=order.__getitem__))


def maximal_multisets(geo: Geometry) -> tuple[Multiset, ...]:
    """Return the distinct multisets of the maximal layouts (14 on a seven-slice GPU, 38 with the double-memory 1g, 4 on
    A30).
    """
    return tuple(dict.fromkeys(multiset(geo, layout) for layout in maximal_layouts(geo)))


def reachable(geo: Geometry, running: Iterable[Placement]) -> tuple[Layout, ...]:
    """Return the maximal layouts that keep every running instance in place."""
    keep = set(running)
    if not geo.fits(keep):
        raise InputError(f"{geo.format(keep)} is not a legal set of instances on {geo.gpu}", field="running")
    variants = {p for p in keep if p.kind in geo.variants}
    if not variants:
        return tuple(layout for layout in maximal_layouts(geo) if keep <= set(layout))
    wider = (tuple(sorted((*variants, *layout))) for layout in legal_layouts(geo) if keep - variants <= set(layout))
    options = geo.placements()
    return tuple(
        layout
        for layout in wider
        if geo.fits(layout) and not any(geo.fits((*layout, extra)) for extra in options if extra not in layout)
    )


def place(geo: Geometry, kinds: Sequence[str], keep: Iterable[Placement] = ()) -> Layout | None:
    """Return a legal placement of these kinds that keeps as many of the instances in `keep` as possible. Among equally
    good placements, one whose instances have the order of `kinds` on the axis of memory slots is preferred.
    """
    matches: set[Layout] = set()

    def grow(layout: Layout, left: list[str]) -> None:
        if not left:
            matches.add(tuple(sorted(layout)))
            return
        # instances of one kind are interchangeable, so only one order of them is enumerated
        after = layout[-1].start if layout and layout[-1].kind == left[0] else -1
        for start in geo.every[left[0]].starts:
            wider = (*layout, Placement(start, left[0]))
            if start > after and geo.fits(wider):
                grow(wider, left[1:])

    grow((), sorted(kinds))
    kept = set(keep)
    return min(
        matches, key=lambda m: (-len(kept.intersection(m)), [p.kind for p in m] != list(kinds), m), default=None
    )  # fmt: skip


def kind_of(geo: Geometry, text: str) -> str:
    """Return the kind of MIG instance that is named by `3`, `3g`, `1+`, `1g+`, `3g.40gb` or a full name of this GPU."""
    word = text.strip().lower().removeprefix("mig ")
    for profile in geo.every.values():
        if word in (profile.kind, profile.kind.replace("g", "", 1), profile.name, profile.also or profile.name):
            return profile.kind
    if re.fullmatch(r"\d+c\.\d+g\..*", word):
        raise InputError(
            f"{text.strip()!r} is a part of an instance; give the whole instance, {word.partition('.')[2]}",
            field="layout",
        )
    offered = ", ".join(p.name for p in geo.every.values())
    raise InputError(f"{geo.gpu} has no MIG profile {text.strip()!r}; it offers {offered}", field="layout")


@cache
def every_name() -> frozenset[str]:
    """Return the kinds and full names of the profiles of all catalogued GPUs, and the short forms of the kinds (`3`,
    `1+`).
    """
    profiles = [p for name in TABLES for p in geometry(name, double_memory=True).every.values()]
    return frozenset(n for p in profiles for n in (p.kind, p.name, p.also, p.kind.replace("g", "", 1)) if n)


def parse_layout(geo: Geometry, text: str) -> Layout:
    """Parse a layout: `3,2,2` (compute slices, `1+` for the double-memory 1g) or `3g.40gb@0,2g.20gb@4`.

    Raises InputError if it does not exist on this GPU.
    """
    words = [w for w in re.split(r"[,\s]+", text.strip().strip("[]")) if w]
    if not words:
        raise InputError("the layout is empty; give one such as 3,2,2", field="layout")
    placed = sum("@" in w for w in words)
    if placed not in (0, len(words)):
        raise InputError(
            f"layout {text!r} mixes slices with and without a start; give a start to all or to none", field="layout"
        )
    if not placed:
        layout = place(geo, [kind_of(geo, w) for w in words])
        if layout is None:
            raise InputError(f"layout {text!r} does not exist on {geo.gpu}; see `cotenant mig layouts`", field="layout")
        return layout
    result = tuple(sorted(_placement_on(geo, word) for word in words))
    if not geo.fits(result):
        raise InputError(
            f"the instances of layout {text!r} overlap, or together need more than the {geo.compute_slices} compute "
            f"slices or the media engines of {geo.gpu}",
            field="layout",
        )
    return result


def _placement_on(geo: Geometry, word: str) -> Placement:
    name, _, start = word.partition("@")
    profile = geo.every[kind_of(geo, name)]
    if not start.isdigit() or int(start) not in profile.starts:
        allowed = ", ".join(map(str, profile.starts))
        why = f"{profile.name} cannot start at {start}" if start else f"{word!r} has no start"
        raise InputError(f"{why} on {geo.gpu}; possible starts are {allowed}", field="layout")
    return Placement(int(start), profile.kind)

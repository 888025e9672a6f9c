"""Random meshes, arrays and layouts, and what devices hold of them, element by element.

Nothing here uses the formulas of `orbax_reshard.planning`: a device's coordinates come
from counting through the mesh, its elements from slicing Python ranges, chunks from
dividing each element's index. Only the values (`DeviceMesh`, `Intermediate`, ...) are
shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from orbax_reshard.planning.candidates import GroupShape, intermediates
from orbax_reshard.planning.digits import DeviceMesh, DigitMesh, factorise
from orbax_reshard.planning.layout import Intermediate, make_intermediate, rotated
from orbax_reshard.planning.plan import LeafRequest
from orbax_reshard.planning.stored import StoredArray


def fixed(max_examples: int) -> settings:
    """The same examples on every run, and no deadline on a machine that is shared."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# --- meshes ---------------------------------------------------------------------------


def mesh_of(axes: dict[str, int], hosts: Sequence[int] | int = 1) -> DeviceMesh:
    """A mesh of devices 0, 1, ...; ``hosts`` per device, or how many equal ones."""
    total = math.prod(axes.values())
    if isinstance(hosts, int):
        hosts = [i * hosts // total for i in range(total)]
    return DeviceMesh(
        axis_names=tuple(axes),
        axis_sizes=tuple(axes.values()),
        device_ids=tuple(range(total)),
        hosts=tuple(hosts),
    )


@st.composite
def meshes(draw, max_devices: int = 16, total: int | None = None) -> DeviceMesh:
    """Up to four axes, on hosts that are blocks, columns, uneven, or any mixture."""
    sizes: list[int] = []
    room = total or max_devices
    for _ in range(draw(st.integers(0, 3))):
        fit = [n for n in (1, 2, 3, 4, 6, 8, 16) if n <= room]
        if total:
            fit = [n for n in fit if room % n == 0]
        sizes.append(draw(st.sampled_from(fit)))
        room //= sizes[-1]
    if total or not sizes:
        sizes.append(room if total else 1)
    count = math.prod(sizes)
    kind = draw(st.sampled_from(["blocks", "columns", "grid", "uneven", "any"]))
    num_hosts = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if count % n == 0]))
    flat = np.arange(count)
    if kind == "blocks":
        hosts = flat * num_hosts // count
    elif kind == "columns":
        hosts = flat % num_hosts
    elif kind == "grid":
        # Hosts are the positions along some axes: regular, in no simple order.
        chosen = [draw(st.booleans()) for _ in sizes]
        hosts = np.zeros(sizes, int)
        for axis, (size, cross) in enumerate(zip(sizes, chosen, strict=True)):
            if cross:
                shape = [size if i == axis else 1 for i in range(len(sizes))]
                hosts = hosts * size + np.arange(size).reshape(shape)
        hosts = hosts.reshape(-1)
    elif kind == "uneven":
        hosts = np.sort(
            draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        )
    else:
        hosts = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return DeviceMesh(
        axis_names=tuple(f"a{i}" for i in range(len(sizes))),
        axis_sizes=tuple(sizes),
        device_ids=tuple(draw(st.permutations(range(count)))),
        hosts=tuple(int(h) for h in hosts),
    )


def coordinates(digits: DigitMesh) -> list[tuple[int, ...]]:
    """For each device in mesh order its place along every digit."""
    return list(itertools.product(*map(range, digits.sizes)))


def index_of(place: Sequence[int], run: Sequence[int], digits: DigitMesh) -> int:
    """The number that a device's digits of ``run`` spell, major first."""
    number = 0
    for digit in run:
        number = number * digits.sizes[digit] + place[digit]
    return number


# --- arrays and layouts ---------------------------------------------------------------


@st.composite
def groups(draw, mesh: DeviceMesh, max_rank: int = 3, max_leaves: int = 5):
    """A wave of leaves under a random target over ``mesh``, and its chunk grid."""
    digits = factorise(mesh)
    rank = draw(st.integers(0, max_rank))
    dims: list[list[str]] = [[] for _ in range(rank)]
    for position in draw(st.permutations(range(len(mesh.axis_names)))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(mesh.axis_names[position])
    shape, chunks = [], []
    for axes in dims:
        parts = math.prod(mesh.axis_sizes[mesh.axis_names.index(a)] for a in axes)
        per_part = draw(st.sampled_from([1, 2, 3, 4, 6]))
        shape.append(parts * per_part)
        nice = [n for n in (1, per_part, shape[-1], 2, 3, 4) if n <= shape[-1]]
        chunks.append(draw(st.sampled_from(nice)))
    return (
        digits,
        tuple(map(tuple, dims)),
        GroupShape(
            shape=(draw(st.integers(1, max_leaves)), *shape),
            chunk_shape=(1, *chunks),
            element_bytes=4,
            moved_bytes=4,
            target=((), *digits.layout(dims)),
        ),
    )


@st.composite
def layouts(draw, max_devices: int = 16, max_rank: int = 3):
    """Digits, a group, and one of its intermediates, perhaps turned."""
    digits, _, group = draw(groups(draw(meshes(max_devices)), max_rank))
    family = list(itertools.islice(intermediates(group, digits), 300))
    # Its members are alike in the beginning; take them from everywhere.
    chosen = family[draw(st.integers(0, 10_000)) % len(family)]
    return digits, group, rotated(chosen, draw(st.integers(0, 5)), digits)


def whole_family(group: GroupShape, digits: DigitMesh) -> Iterator[Intermediate]:
    """All, unpruned: each pool digit on any complete dimension or none."""
    used = set(itertools.chain.from_iterable(group.target))
    replicas = [d for d in range(len(digits.sizes)) if d not in used]
    rank = len(group.shape)
    for kept in itertools.product(*(range(len(t) + 1) for t in group.target)):
        pool = list(replicas)
        for target, num in zip(group.target, kept, strict=True):
            pool += target[num:]
        homes = [d for d in range(rank) if kept[d] == len(group.target[d])]
        for choice in itertools.product([None, *homes], repeat=len(pool)):
            extras: list[list[int]] = [[] for _ in range(rank)]
            for digit, home in zip(pool, choice, strict=True):
                if home is not None:
                    extras[home].append(digit)
            yield make_intermediate(
                shape=group.shape,
                chunk_shape=group.chunk_shape,
                target=group.target,
                digits=digits,
                num_kept=kept,
                extras=tuple(map(tuple, extras)),
            )


def held(intermediate: Intermediate, digits: DigitMesh) -> list[tuple[range, ...]]:
    """For each device in mesh order the elements that it reads, per dimension."""
    found = []
    for place in coordinates(digits):
        spans = []
        for dim, extent in enumerate(intermediate.shape):
            own = intermediate.target[dim][: intermediate.num_kept[dim]]
            extra = intermediate.extras[dim]
            cross = [d for d in extra if digits.cross_host[d]]
            inside = [d for d in extra if not digits.cross_host[d]]
            # Slices of ranges end where the range ends: no padding by construction.
            width = extent // math.prod(digits.sizes[d] for d in own)
            shard = index_of(place, own, digits)
            span = range(extent)[shard * width : (shard + 1) * width]
            count = math.prod(digits.sizes[d] for d in cross)
            turned = (
                index_of(place, cross, digits) - intermediate.rotation[dim]
            ) % count
            wide, narrow = intermediate.host_width[dim], intermediate.piece_width[dim]
            span = span[turned * wide : (turned + 1) * wide]
            at = index_of(place, inside, digits)
            spans.append(span[at * narrow : (at + 1) * narrow])
        found.append(tuple(spans))
    return found


def chunks_of(
    spans: Sequence[range], chunk_shape: Sequence[int]
) -> set[tuple[int, ...]]:
    """The chunks that hold an element of the box; none when it is empty."""
    per_dim = [
        {i // chunk for i in span}
        for span, chunk in zip(spans, chunk_shape, strict=True)
    ]
    return set(itertools.product(*per_dim))


def chunks_per_host(
    intermediate: Intermediate, digits: DigitMesh, chunk_shape: Sequence[int]
) -> dict[int, tuple[set[tuple[int, ...]], int]]:
    """Per host its distinct chunks, and the count with those of each box repeated."""
    by_host: dict[int, set[tuple[range, ...]]] = {h: set() for h in digits.mesh.hosts}
    for host, spans in zip(digits.mesh.hosts, held(intermediate, digits), strict=True):
        by_host[host].add(spans)
    found = {}
    for host, boxes in sorted(by_host.items()):
        per_box = [chunks_of(box, chunk_shape) for box in boxes]
        found[host] = (set().union(*per_box), sum(map(len, per_box)))
    return found


# --- requests -------------------------------------------------------------------------


def stored(name: str, shape: Sequence[int], chunks: Sequence[int], **kwargs):
    """A stored float32 array, zarr3 unless said otherwise."""
    values = {"dtype": "float32", "dtype_bytes": 4, "driver": "zarr3"} | kwargs
    return StoredArray(
        name=name, shape=tuple(shape), chunk_shape=tuple(chunks), **values
    )


def request(
    name: str,
    mesh: DeviceMesh | None,
    shape: Sequence[int],
    chunks: Sequence[int],
    *spec: str | tuple[str, ...] | None,
    encoded_bytes: tuple[int, ...] | None = None,
    **kwargs,
) -> LeafRequest:
    """A float32 leaf; ``spec`` as in a PartitionSpec, shorter where replicated."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return LeafRequest(
        stored=stored(name, shape, chunks, encoded_bytes=encoded_bytes),
        mesh=mesh,
        spec=tuple(
            () if e is None else (e,) if isinstance(e, str) else tuple(e)
            for e in entries
        ),
        **{"dtype": "float32", "moved_bytes": 4} | kwargs,
    )

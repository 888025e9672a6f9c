"""The restore scenarios of the cluster tests, as tables with a comment per row.

Rows that are called R... come from the cases that people met in the field. Leaves are
small where only their bits matter (`BITS`), and large where bytes are counted
(`BYTES`): there every chunk is well above the 1,024 bytes up to which OCDBT keeps a
value inside its index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scenarios import Leaf, Scenario, Spec

COUNTS = (1, 2, 4, 8)


def _parts(mesh: Mapping[str, int], entry: Any) -> int:
    axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh[axis] for axis in axes)


def _divides(shape: tuple[int, ...], mesh: Mapping[str, int], spec: Spec) -> bool:
    return all(n % _parts(mesh, e) == 0 for n, e in zip(shape, spec, strict=False))


# --- R12 and R100: every source and target count --------------------------------------

R12_KERNELS = ((16, 8), (8, 8), (8, 4))
R12_SPECS: tuple[Spec, ...] = (("model", None), (None, "model"), (None, None))


def _r12(source: int, target: int) -> dict[str, Leaf]:
    """Every kernel with every target spec; the saved specs take turns."""
    found = {}
    for k, shape in enumerate(R12_KERNELS):
        for t, spec in enumerate(R12_SPECS):
            saved = R12_SPECS[(k + t) % 3]
            if _divides(shape, {"model": source}, saved) and _divides(
                shape, {"model": target}, spec
            ):
                found[f"kernel{k}_{t}"] = Leaf(shape, saved, spec)
    return found


# How R100 splits a count over the axes a and b; neither is trivial where it can be.
_AB = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}
_R100_SPECS: tuple[Spec, ...] = (
    (("a", "b"), None),
    (("b", "a"), None),
    (None, ("b", "a")),
    ("b", "a"),
)


def _r100() -> dict[str, Leaf]:
    """Tuple axes in both orders; each target spec meets two saved ones."""
    shape = (16, 8)
    pairs = [(s, (s + d) % 4) for s in range(4) for d in (0, 1)]
    return {
        f"rows_{s}_{t}": Leaf(shape, _R100_SPECS[s], _R100_SPECS[t]) for s, t in pairs
    }


def _grids() -> Iterator[Scenario]:
    for i, source in enumerate(COUNTS):
        for j, target in enumerate(COUNTS):
            # Two processes take every target that reaches both, four the widest ones;
            # of the rest a covering subset keeps the time down.
            processes = (1, 2, 4) if target == 8 else (1, 2) if target == 4 else (1,)
            yield Scenario(
                id=f"R12-{source}-to-{target}",
                saved={"model": source},
                target={"model": target},
                leaves=_r12(source, target),
                processes=processes,
                replica_parallel=False,
            )
            saved = dict(zip("ab", _AB[source], strict=True))
            for k, order in enumerate(("forward", "reversed", "interleaved")):
                # Each (source, target) meets one order in clusters, in turn.
                wide = processes if (i + j) % 3 == k else (1,)
                yield Scenario(
                    id=f"R100-{source}-to-{target}-{order}",
                    saved=saved,
                    target=dict(zip("ab", _AB[target], strict=True)),
                    leaves=_r100(),
                    order=order,
                    processes=wide,
                    replica_parallel=False,
                )


# --- other rows -----------------------------------------------------------------------

DATA_FSDP_TENSOR = ("data", "fsdp", "tensor")


def mesh(*sizes: int) -> dict[str, int]:
    """A (data, fsdp, tensor) mesh."""
    return dict(zip(DATA_FSDP_TENSOR, sizes, strict=True))


def transformer() -> dict[str, Leaf]:
    """Kernels over fsdp and tensor and replicated scales, as MaxText shards them."""
    ft: Spec = ("fsdp", "tensor")
    tf: Spec = ("tensor", "fsdp")
    return {
        "embedding": Leaf((1024, 512), ft, ft),
        "wi_0": Leaf((1024, 512), ft, ft, dtype="bfloat16"),
        "wi_1": Leaf((1024, 512), ft, ft, dtype="bfloat16"),
        "wo": Leaf((512, 1024), tf, tf, dtype="bfloat16"),
        # 2 KiB when cut into 32 chunks, which is more than OCDBT inlines.
        **{f"scale_{i}": Leaf((16384,), (None,), (None,)) for i in range(4)},
    }


def _rows() -> Iterator[Scenario]:
    """The rows whose bytes count; saved and restored along one axis, x."""
    rows: Spec = ("x", None)
    cols: Spec = (None, "x")
    whole: Spec = (None, None)
    mib = (256, 1024)
    # R14: one chunk per leaf; alone it has one owner, five share four hosts unevenly.
    for count in (4, 8):
        yield Scenario(
            id=f"R14-1-to-{count}",
            saved={"x": 1},
            target={"x": count},
            leaves={
                "alone": Leaf((256, 512), rows, cols),
                **{f"five{i}": Leaf((128, 512), rows, rows) for i in range(5)},
            },
            processes=(1, 2, 4) if count == 8 else (1, 2),
        )
    # R20: whole experts in a chunk, and every device wants a column of each.
    yield Scenario(
        id="R20",
        saved={"expert": 8},
        target={"fsdp": 8},
        leaves={"experts": Leaf((8, 64, 512), ("expert",), (None, "fsdp"))},
        even=True,
    )
    # R21: one chunk, which no device count may fetch more than once.
    for count in (2, 8):
        yield Scenario(
            id=f"R21-{count}",
            saved={"fsdp": 1},
            target={"fsdp": count},
            leaves={"chunk": Leaf((32, 128, 128), (), (None, "fsdp"))},
            processes=(1, 2, 4) if count == 8 else (1, 2),
        )
    # R23 and R70: the replica axis outside and inside of a process.
    for name, axes in (
        ("R23", {"replica": 2, "fsdp": 4}),
        ("R70", {"fsdp": 4, "replica": 2}),
    ):
        yield Scenario(
            id=name,
            saved=axes,
            target=axes,
            leaves={"w": Leaf((64, 4096), ("fsdp", None), ("fsdp", None))},
            even=True,
        )
    # R24: saved from devices that all held everything.
    yield Scenario(
        id="R24",
        saved={"x": 8},
        target={"x": 8},
        leaves={
            "mib8": Leaf((2048, 1024), whole, whole),
            "mib4": Leaf((1024, 1024), whole, whole),
            "mib1": Leaf(mib, whole, whole),
        },
        even=True,
    )
    # The same, saved in eight pieces, in one piece.
    for count in (8, 1):
        yield Scenario(
            id=f"R24-from-{count}",
            saved={"x": count},
            target={"x": 8},
            leaves={
                "mib8": Leaf((2048, 1024), rows, whole),
                "mib4": Leaf((1024, 1024), rows, whole),
                "mib1": Leaf(mib, rows, whole),
            },
            even=count == 8,
        )
    # R26: nothing to gain for the aligned leaves, and scalars live in OCDBT's index.
    yield Scenario(
        id="R26",
        saved={"x": 8},
        target={"x": 8},
        leaves={
            **{f"aligned{i}": Leaf((64, 1024), rows, rows) for i in range(8)},
            **{f"scalar{i:02}": Leaf((), (), ()) for i in range(50)},
        },
    )
    # R101: more devices than before; 3 to 6 factors into unequal digits.
    for source, count in ((4, 8), (2, 8), (3, 6)):
        yield Scenario(
            id=f"R101-{source}-to-{count}",
            saved={"x": source},
            target={"x": count},
            leaves={
                "rows": Leaf((48, 1536), rows, rows),
                "cols": Leaf((48, 1536), rows, cols),
                "turned": Leaf((48, 1536), cols, rows),
            },
            processes=(1, 2) if count == 6 else (1, 2, 4),
        )
    # R103: the order of the target's devices is the caller's.
    for order in ("reversed", "interleaved"):
        yield Scenario(
            id=f"R103-{order}",
            saved={"x": 8, "y": 1},
            target={"x": 2, "y": 4},
            leaves={
                "both": Leaf((64, 512), rows, ("x", "y")),
                "tuple": Leaf((64, 512), rows, (None, ("y", "x"))),
                "replicas": Leaf((64, 512), rows, (None, "y")),
            },
            order=order,
            even=True,
        )
    # Chunks that do not divide the devices: 6 and 3 onto 8, 8 onto 6.
    for source, count in ((6, 8), (3, 8), (8, 6)):
        yield Scenario(
            id=f"grid-{source}-to-{count}",
            saved={"x": source},
            target={"x": count},
            leaves={
                "whole": Leaf((48, 1536), rows, whole),
                "cols": Leaf((48, 1536), rows, cols),
                **{f"rows{i}": Leaf((48, 1536), rows, rows) for i in range(4)},
            },
            processes=(1, 2) if count == 6 else (1, 2, 4),
        )
    # The group dimension is padded when leaves do not divide the hosts.
    for count in (1, 3, 5):
        yield Scenario(
            id=f"group-of-{count}",
            saved={"x": 1},
            target={"x": 8},
            leaves={f"leaf{i}": Leaf((4096,), ("x",), (None,)) for i in range(count)},
        )


def _formats() -> Iterator[Scenario]:
    """Every storage format, chunked as saved and subchunked."""
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            for limit in (None, 8192):
                kind = f"{'ocdbt' if ocdbt else 'plain'}-zarr{3 if zarr3 else 2}"
                yield Scenario(
                    id=f"{kind}{'-subchunked' if limit else ''}",
                    saved={"x": 4},
                    target={"y": 2, "x": 4},
                    leaves={
                        "f32": Leaf((64, 1024), ("x", None), (None, "x")),
                        "bf16": Leaf((64, 1024), ("x", None), (None, None), "bfloat16"),
                        "int8": Leaf((64, 1024), (None, "x"), ("x", "y"), "int8"),
                        "bool": Leaf((64, 1024), ("x", None), ("y", "x"), "bool"),
                    },
                    zarr3=zarr3,
                    ocdbt=ocdbt,
                    even=True,
                    save_args={} if limit is None else {"chunk_byte_size": limit},
                )


def _inner_chunks() -> Iterator[Scenario]:
    """Eight inner chunks of 8 KiB in each stored value: the unit of reading."""
    for ocdbt in (True, False):
        yield Scenario(
            id=f"inner-chunks-{'ocdbt' if ocdbt else 'plain'}",
            saved={"x": 2},
            target={"y": 2, "x": 4},
            leaves={
                "cols": Leaf((32, 1024), ("x", None), (None, "x")),
                "whole": Leaf((32, 1024), ("x", None), (None, None)),
            },
            ocdbt=ocdbt,
            even=True,
            replica_parallel=False,
            inner_chunks=(2, 1024),
        )


def _demo() -> Iterator[Scenario]:
    """The three targets of the demo."""
    for sizes in ((8, 1, 1), (1, 1, 8), (2, 2, 2)):
        yield Scenario(
            id="demo-" + "-".join(map(str, sizes)),
            saved=mesh(4, 8, 1),
            target=mesh(*sizes),
            leaves=transformer(),
            even=True,
        )


def _repeated() -> Iterator[Scenario]:
    """Programs and plans are kept."""
    shapes = [(64, 32 * (i + 1)) for i in range(6)]
    # R27: few programs for many leaves; the second restore compiles nothing.
    yield Scenario(
        id="R27",
        saved={"x": 8},
        target={"x": 8},
        leaves={
            f"leaf{i:03}": Leaf(shapes[i % 6], ("x", None), (None, "x"))
            for i in range(300)
        },
        repeats=2,
        processes=(1, 2),
    )
    # R104: a process that restores again and again.
    yield Scenario(
        id="R104",
        saved={"x": 4},
        target={"x": 8},
        leaves={
            "w": Leaf((64, 1024), ("x", None), (None, "x")),
            "scale": Leaf((4096,), (None,), (None,)),
        },
        repeats=20,
        processes=(1, 2),
    )


# The clusters of 4 processes x 32 devices; saved by one process with 128.
def _public() -> Iterator[Scenario]:
    """The public Orbax resharding scenarios, with their real device counts."""
    for saved, target in (
        ((4, 8, 4), (1, 32, 1)),
        ((4, 8, 4), (1, 128, 1)),
        ((8, 2, 1), (1, 16, 1)),
        ((8, 2, 1), (1, 4, 1)),
        ((8, 2, 1), (8, 2, 1)),
    ):
        yield Scenario(
            id=f"{'-'.join(map(str, saved))}-on-{'-'.join(map(str, target))}",
            saved=mesh(*saved),
            target=mesh(*target),
            leaves=transformer(),
            processes=(4,),
            devices=128,
            even=True,
            replica_parallel=saved != (4, 8, 4),
        )


_COUNTED = (*_rows(), *_formats(), *_inner_chunks(), *_demo(), *_public())
SCENARIOS = (*_grids(), *_COUNTED, *_repeated())
BY_ID = {scenario.id: scenario for scenario in SCENARIOS}
assert len(BY_ID) == len(SCENARIOS)

# Rows whose chunks lie outside OCDBT's index, so that their bytes can be counted.
COUNTED = frozenset(s.id for s in _COUNTED)

# Clusters: (processes, devices of all processes).
CLUSTERS = ((1, 8), (2, 8), (4, 8), (4, 128))


def of_cluster(processes: int, devices: int) -> tuple[Scenario, ...]:
    """The scenarios that a cluster runs, in order."""
    return tuple(
        s for s in SCENARIOS if processes in s.processes and s.devices == devices
    )

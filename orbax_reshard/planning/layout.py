"""The intermediate layout, and the exchange that turns it into the target.

On each dimension of an array the intermediate keeps a *prefix* of the target's
digits. The suffix that was dropped, and the replica digits, may be placed as
*extras* behind the digits of a dimension that dropped nothing:

    target        rows: -          cols: a b c      replicas: d
    kept          rows: -          cols: a
    extras        rows: b c d      cols: -          (b, c dropped by cols)
    intermediate  rows: b c d      cols: a

so a dimension is a donor (lost a suffix), a receiver (gained extras) or neither, and
each digit makes exactly one move on the way to the target:

1. a suffix digit that is used nowhere: a local slice, no traffic;
2. a suffix digit that became an extra elsewhere: an all-to-all, the block keeps its
   size;
3. a replica digit that became an extra: an all-gather; cross-host digits first,
   while the pieces are small;
4. one local transpose puts the gathered digits in order.

All-to-all before all-gather is the order of "Memory-efficient array redistribution
through portable collective communication" (arXiv 2112.01075), here over digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from orbax_reshard.planning.boxes import Box, ceil_div
from orbax_reshard.planning.digits import DigitMesh, Layout

StepKind = Literal["slice", "all_to_all", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One move of the exchange; ``digits`` move together, major first.

    Attributes:
        kind: slice (local), all_to_all or all_gather.
        digits: the digits that move.
        donor: the dimension that the digits leave, or None for replica digits.
        receivers: per digit the dimension that held it as an extra; empty for a
            slice.
    """

    kind: StepKind
    digits: tuple[int, ...]
    donor: int | None
    receivers: tuple[int, ...]

    @property
    def hlo_name(self) -> str:
        """What compiled HLO, and the records, call this kind of move."""
        return self.kind.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate:
    """An intermediate layout of one (grouped) array over the target's mesh.

    Dimension ``d`` of ``shape`` is cut into ``num_parts(kept)`` equal shards of
    ``shard_width[d]``. A receiver cuts each shard again: first among the cross-host
    extras into ``host_width[d]``, then among the in-host extras into
    ``piece_width[d]``. Both may round up, so that host boundaries fall on chunk
    edges; what lies past the shard is padding that nobody reads.

    Attributes:
        shape: extents in elements.
        target: the digits of the target per dimension.
        num_kept: how many target digits each dimension keeps.
        extras: the digits behind them, cross-host ones first.
        shard_width: elements of a kept shard per dimension.
        host_width: elements of a cross-host piece per dimension.
        piece_width: elements of a device's block per dimension.
        rotation: per dimension by how many cross-host pieces the assignment is
            turned. Where padding leaves hosts idle, groups turn differently, so that
            it is not always the last host that idles.
    """

    shape: tuple[int, ...]
    target: Layout
    num_kept: tuple[int, ...]
    extras: Layout
    shard_width: tuple[int, ...]
    host_width: tuple[int, ...]
    piece_width: tuple[int, ...]
    rotation: tuple[int, ...]

    @property
    def kept(self) -> Layout:
        """The target digits that each dimension keeps."""
        return tuple(t[:n] for t, n in zip(self.target, self.num_kept, strict=True))

    @property
    def layout(self) -> Layout:
        """All digits per dimension: the kept ones, then the extras."""
        return tuple(k + e for k, e in zip(self.kept, self.extras, strict=True))

    @property
    def is_target(self) -> bool:
        """True when hosts read what they keep, and nothing is exchanged."""
        return self.layout == self.target

    def cross_extras(self, dim: int, digits: DigitMesh) -> tuple[int, ...]:
        """The extras of ``dim`` that leave the process."""
        return tuple(x for x in self.extras[dim] if digits.cross_host[x])

    def intervals(self, dim: int, digits: DigitMesh) -> np.ndarray:
        """What each part of ``dim`` covers, without padding.

        Returns:
            int64 array of shape ``(num_parts, 2)``: start and stop in elements, by
            part index under ``layout[dim]``. An all-padding part has start == stop.
        """
        across = digits.num_parts(self.cross_extras(dim, digits))
        total = digits.num_parts(self.layout[dim])
        part = np.arange(total, dtype=np.int64)
        inside = digits.num_parts(self.extras[dim]) // across
        within = part % inside
        host = (part // inside - self.rotation[dim]) % across
        shard = part // (inside * across)
        width = self.shard_width[dim]
        host_stop = np.minimum((host + 1) * self.host_width[dim], width)
        start = host * self.host_width[dim] + within * self.piece_width[dim]
        stop = np.minimum(start + self.piece_width[dim], host_stop)
        start = np.minimum(start, stop)
        return np.stack([shard * width + start, shard * width + stop], axis=1)

    def device_boxes(self, digits: DigitMesh) -> list[Box]:
        """The box that each device reads, in mesh order; padding left out."""
        per_dim: list[list[list[int]]] = []
        for dim, layout in enumerate(self.layout):
            spans = self.intervals(dim, digits)[digits.part_indices(layout)]
            per_dim.append(spans.tolist())
        return [
            tuple((a, b) for a, b in spans) for spans in zip(*per_dim, strict=True)
        ] or [()] * digits.mesh.num_devices

    def local_origin(self, box: Box) -> Box:
        """The block of buffer positions that a device's box starts at."""
        return tuple(
            (start, start + width)
            for (start, _), width in zip(box, self.piece_width, strict=True)
        )

    def steps(self, digits: DigitMesh) -> tuple[Step, ...]:
        """The exchange: slices, all-to-alls, then gathers, cross-host ones first."""
        home = {x: dim for dim, extras in enumerate(self.extras) for x in extras}
        slices: list[Step] = []
        all_to_alls: list[Step] = []
        for dim, (target, num) in enumerate(
            zip(self.target, self.num_kept, strict=True)
        ):
            for to, run in itertools.groupby(target[num:], home.get):
                moved = tuple(run)
                if to is None:
                    slices.append(
                        Step(kind="slice", digits=moved, donor=dim, receivers=())
                    )
                else:
                    all_to_alls.append(
                        Step(
                            kind="all_to_all",
                            digits=moved,
                            donor=dim,
                            receivers=(to,) * len(moved),
                        )
                    )
        in_target = set(itertools.chain.from_iterable(self.target))
        gathers: list[Step] = []
        for across in (True, False):
            moved = tuple(
                x
                for extras in self.extras
                for x in extras
                if x not in in_target and digits.cross_host[x] is across
            )
            if moved:
                gathers.append(
                    Step(
                        kind="all_gather",
                        digits=moved,
                        donor=None,
                        receivers=tuple(home[x] for x in moved),
                    )
                )
        return (*slices, *all_to_alls, *gathers)


def make_intermediate(
    *,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    target: Layout,
    digits: DigitMesh,
    num_kept: Sequence[int],
    extras: Layout,
) -> Intermediate:
    """Completes a choice of kept prefixes and extras with the widths of its pieces.

    Args:
        shape: extents of the array; each divides by its target digits.
        chunk_shape: stored chunk extents; host pieces are rounded up to them where
            the target shards start on chunk edges.
        target: the target's digits per dimension.
        digits: the mesh.
        num_kept: length of the kept prefix per dimension.
        extras: digits placed behind complete prefixes; reordered cross-host first.

    Raises:
        ValueError: extras on a dimension that dropped digits.
    """
    ordered = tuple(
        tuple(sorted(e, key=lambda x: not digits.cross_host[x])) for e in extras
    )
    shard, host, piece = [], [], []
    for extent, chunk, own, num, extra in zip(
        shape, chunk_shape, target, num_kept, ordered, strict=True
    ):
        if extra and num != len(own):
            raise ValueError(f"extras {extra} on a dimension that dropped digits")
        width = extent // digits.num_parts(own[:num])
        across = digits.num_parts([x for x in extra if digits.cross_host[x]])
        inside = digits.num_parts(extra) // across
        # Rounding up to chunks may leave the last hosts idle, but never makes two
        # hosts read one chunk. Shards that start off the grid cannot have that.
        unit = chunk if width % chunk == 0 or width == extent else 1
        host_width = (
            ceil_div(ceil_div(width, unit), across) * unit if across > 1 else width
        )
        shard.append(width)
        host.append(host_width)
        piece.append(ceil_div(host_width, inside))
    return Intermediate(
        shape=tuple(shape),
        target=target,
        num_kept=tuple(num_kept),
        extras=ordered,
        shard_width=tuple(shard),
        host_width=tuple(host),
        piece_width=tuple(piece),
        rotation=(0,) * len(shard),
    )


def rotated(intermediate: Intermediate, by: int, digits: DigitMesh) -> Intermediate:
    """Turns the cross-host pieces of every padded dimension by ``by`` places."""
    turns: list[int] = []
    for dim, width in enumerate(intermediate.shard_width):
        across = digits.num_parts(intermediate.cross_extras(dim, digits))
        padded = across * intermediate.host_width[dim] > width
        turns.append(by % across if padded else 0)
        by //= across if padded else 1
    return replace(intermediate, rotation=tuple(turns))


def block_bytes(intermediate: Intermediate, element_bytes: int) -> int:
    """Bytes of one device's block under the intermediate, padding included."""
    return math.prod(intermediate.piece_width) * element_bytes

"""What moving a wave of live leaves costs a device: bytes received, peak, collectives.

The peak bounds what XLA's memory analysis reports for the wave's program: argument +
result + temporaries. A device writes these values, in brackets what only some plans
have:

    argument -> [stacked] -> packed -> [sliced] -> [permuted] -> each step -> [joined]
                                                                          -> result

Argument and result count the whole time, the others while the next one is written. XLA
does better where a temporary may use the result's memory (4.25 MiB for 4.5 in the case
of 64 rows to 8 columns), but when it does so is not ours to predict; tests compare the
two over random layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.cost import ExchangeCost
from orbax_reshard.planning.layout import Step, block_bytes
from orbax_reshard.planning.relayout import Relayout

# The widest word that an element travels as (engine/transport.py).
_WORD_BYTES = 4

# Several values that an operation takes or returns stand in a table of pointers, which
# XLA counts: results as output, the pieces of an all-to-all as a temporary.
_POINTER_BYTES = 8

# Temporaries start at multiples of this in XLA (cpu_function_runtime::MinAlign), which
# only shows where blocks are tiny.
_ALIGNMENT_BYTES = 64


def relayout_cost(relayout: Relayout, *, element_bytes: int) -> ExchangeCost:
    """What one device does in one wave.

    Args:
        relayout: the wave's plan; dimension 0 of its shape counts leaves.
        element_bytes: bytes of an element on the device; a whole one for types that
            are narrower than a byte.
    """
    intermediate, digits = relayout.intermediate, relayout.digits
    leaves = intermediate.shape[0]
    start = block_bytes(intermediate, element_bytes)
    result = math.prod(intermediate.shape) * element_bytes
    for run in intermediate.target:
        result //= digits.num_parts(run)

    # Types wider than 4 bytes are taken apart into words, and put together again.
    wide = element_bytes > _WORD_BYTES
    several = leaves > 1
    # A lone narrow leaf is packed in the same loop that slices it.
    fused = bool(relayout.slices) and not several and not wide
    alive = _Alive([start] * (several + wide + (not fused)))
    block = start
    tables = leaves * _POINTER_BYTES
    in_host = cross_host = collectives = 0
    for step in relayout.slices:
        block //= _count(step, digits.sizes)
        alive.write(block)
    if relayout.permutation:
        collectives += 1
        hosts = digits.mesh.hosts
        if any(hosts[a] != hosts[b] for a, b in relayout.permutation):
            cross_host += block
        else:
            in_host += block
        alive.write(block)
    for step in relayout.steps[len(relayout.slices) :]:
        count = _count(step, digits.sizes)
        inside = math.prod(
            digits.sizes[d] for d in step.digits if not digits.cross_host[d]
        )
        if step.kind == "all_gather":
            block *= count
        else:
            # Cut into one piece for each receiver, whose memory is not contiguous.
            alive.write(block, pieces=count, cut=True)
            tables += _aligned(count * _POINTER_BYTES)
        collectives += 1
        in_host += block // count * (inside - 1)
        cross_host += block // count * (count - inside)
        alive.write(block, pieces=count if step.kind == "all_to_all" else 1)
    for _ in range(several + wide):
        alive.write(result)
    moves = bool(relayout.permutation or relayout.steps)
    return ExchangeCost(
        in_host_bytes=in_host,
        cross_host_bytes=cross_host,
        num_collectives=collectives,
        peak_bytes=start + (alive.peak_bytes + result + tables if moves else 0),
        result_bytes=result,
    )


def _count(step: Step, sizes: Sequence[int]) -> int:
    """How many devices a step's digits count."""
    return math.prod(sizes[d] for d in step.digits)


def _aligned(size: int) -> int:
    """Bytes that a temporary of ``size`` bytes takes."""
    return ceil_div(size, _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Alive:
    """Follows which values a device holds beside argument and result."""

    def __init__(self, sizes: list[int]) -> None:
        """The first values that are written, one from the other."""
        self._last = 0
        self._whole = 0
        self.peak_bytes = 0
        for size in sizes:
            self.write(size)

    def write(self, size: int, *, pieces: int = 1, cut: bool = False) -> None:
        """The next value is written, beside the last one.

        What pieces are ``cut`` from stays until the value behind them is written.
        """
        size = pieces * _aligned(ceil_div(size, pieces))
        self.peak_bytes = max(self.peak_bytes, self._whole + self._last + size)
        self._whole, self._last = (self._last if cut else 0), size

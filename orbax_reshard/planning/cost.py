"""Seconds and bytes of a candidate: read, exchange, memory.

    seconds = read + exchange + what of the compilation the read cannot hide

Read and exchange of *different* waves overlap; within a group this sum is the upper
estimate, and it is the same for every candidate, so it ranks them fairly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orbax_reshard.planning.digits import DigitMesh
from orbax_reshard.planning.layout import Step
from orbax_reshard.planning.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """What one device does in the exchange of one wave.

    Attributes:
        in_host_bytes: received from devices of the same process.
        cross_host_bytes: received from other processes.
        num_collectives: collectives launched.
        peak_bytes: the largest of (argument + before + after) over the steps, with
            the copies that XLA makes around them; a bound that its own figures keep.
        result_bytes: the device's block under the target.
    """

    in_host_bytes: int
    cross_host_bytes: int
    num_collectives: int
    peak_bytes: int
    result_bytes: int


def exchange_cost(
    steps: Sequence[Step],
    *,
    start_bytes: int,
    result_bytes: int,
    digits: DigitMesh,
    num_results: int = 1,
) -> ExchangeCost:
    """Walks the steps with the size of the local block.

    Args:
        steps: the moves, in order.
        start_bytes: the block under the intermediate, padding included.
        result_bytes: the block under the target.
        digits: the mesh.
        num_results: arrays that the result is handed out in, one per leaf.
    """
    block = start_bytes
    in_host = cross_host = collectives = 0
    peak = start_bytes + result_bytes if steps else start_bytes
    for number, step in enumerate(steps):
        count = math.prod(digits.sizes[d] for d in step.digits)
        inside = math.prod(
            digits.sizes[d] for d in step.digits if not digits.cross_host[d]
        )
        if step.kind == "slice":
            after = block // count
        else:
            collectives += 1
            after = block if step.kind == "all_to_all" else block * count
            shared = after // count
            in_host += shared * (inside - 1)
            cross_host += shared * (count - inside)
        if step.kind == "all_to_all":
            # XLA cuts the block into what it sends and joins what it receives; what
            # an earlier one has joined is still there, in another order.
            copies = 3 if collectives == 1 else 4
            peak = max(peak, start_bytes + copies * block)
        # The first step has the argument as its block, later ones beside theirs.
        beside = start_bytes if number else 0
        peak = max(peak, beside + block + after)
        block = after
    if steps:
        # The local transpose writes the result beside the last block. Where leaves are
        # cut apart, or padding off, a whole block in the new order comes before that,
        # and with padding perhaps another that is turned (see `layout.rotated`).
        ordered = block * (2 if block != result_bytes else num_results > 1)
        peak = max(peak, start_bytes + block + ordered + result_bytes)
    return ExchangeCost(
        in_host_bytes=in_host,
        cross_host_bytes=cross_host,
        num_collectives=collectives,
        peak_bytes=peak,
        result_bytes=result_bytes,
    )


def read_seconds(
    *,
    max_host_bytes: float,
    total_bytes: float,
    num_requests: float,
    profile: HardwareProfile,
) -> float:
    """Seconds until the busiest host has decoded its part."""  # fmt: skip
    link = max_host_bytes / profile.storage_bytes_per_second
    shared = total_bytes / profile.storage_total_bytes_per_second
    decode = max_host_bytes / profile.decode_bytes_per_second
    # Requests run many at a time (Orbax's TensorStore context allows 128 file
    # operations), so latency is paid once per 128 of them.
    waiting = math.ceil(num_requests / 128) * profile.request_seconds
    return max(link, shared, decode) + waiting


def place_seconds(*, host_bytes: float, profile: HardwareProfile) -> float:
    """Seconds to copy a host's blocks to its devices."""
    return host_bytes / profile.host_to_device_bytes_per_second


def exchange_seconds(
    cost: ExchangeCost, *, devices_per_host: int, profile: HardwareProfile
) -> float:
    """Seconds of one wave's exchange on the busiest host."""
    return (
        cost.in_host_bytes / profile.in_host_bytes_per_second
        + cost.cross_host_bytes * devices_per_host / profile.cross_host_bytes_per_second
        + cost.num_collectives * profile.collective_seconds
    )

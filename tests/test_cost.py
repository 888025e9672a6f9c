"""Bytes and seconds of an exchange, against devices that send and receive."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from planning_oracle import coordinates, fixed, layouts, mesh_of

from orbax_reshard.planning import cost
from orbax_reshard.planning.digits import factorise
from orbax_reshard.planning.layout import Step, block_bytes
from orbax_reshard.planning.profile import CPU_FILE, CPU_OBJECT_STORE


def peers(digits, step, position: int) -> list[int]:
    """The other devices that a step joins a device with, by position."""
    places = coordinates(digits)
    own = places[position]
    return [
        other
        for other, place in enumerate(places)
        if other != position
        and all(
            a == b or digit in step.digits
            for digit, (a, b) in enumerate(zip(own, place, strict=True))
        )
    ]


def walk(steps, start: int, digits, position: int) -> dict[str, int | list[int]]:
    """One device's bytes: blocks between the steps, received, and from where."""
    sizes, inside, across = [start], 0, 0
    hosts = digits.mesh.hosts
    for step in steps:
        joined = peers(digits, step, position)
        if step.kind == "slice":
            sizes.append(sizes[-1] // (len(joined) + 1))
            continue
        # To each the part that is his, or to each everything.
        sent = sizes[-1]
        if step.kind == "all_to_all":
            sent //= len(joined) + 1
        here = sum(hosts[p] == hosts[position] for p in joined)
        inside += sent * here
        across += sent * (len(joined) - here)
        kept = sent
        sizes.append(kept + sent * len(joined))
    return {"sizes": sizes, "inside": inside, "across": across}


@fixed(300)
@given(layouts())
def test_bytes_received_against_devices_that_send(layout):
    digits, _, intermediate = layout
    steps = intermediate.steps(digits)
    # A power of all digits' sizes: shares of it are whole.
    start = math.prod(digits.sizes) ** 2 * 12
    found = cost.exchange_cost(steps, start_bytes=start, result_bytes=7, digits=digits)
    for position in range(digits.mesh.num_devices):
        walked = walk(steps, start, digits, position)
        received = found.in_host_bytes + found.cross_host_bytes
        assert walked["inside"] + walked["across"] == received
        if digits.regular:
            assert found.in_host_bytes == walked["inside"]
        sizes = walked["sizes"]
        if steps:
            # XLA keeps the argument to the end: it counts in every step but the
            # first, which has it as its block.
            between = [
                before + after + (start if number else 0)
                for number, (before, after) in enumerate(itertools.pairwise(sizes))
            ]
            assert found.peak_bytes >= max(*between, start + sizes[-1] + 7)
    assert found.num_collectives == sum(s.kind != "slice" for s in steps)
    assert found.result_bytes == 7


@fixed(300)
@given(layouts())
def test_the_last_block_holds_the_result(layout):
    digits, group, intermediate = layout
    steps = intermediate.steps(digits)
    start = block_bytes(intermediate, group.moved_bytes)
    end = walk(steps, start, digits, 0)["sizes"][-1]
    result = group.moved_bytes * math.prod(
        extent // digits.num_parts(run)
        for extent, run in zip(group.shape, group.target, strict=True)
    )
    assert end >= result


def test_an_exchange_by_hand():
    # Rows 4 ways, 2 hosts of 2, to columns: one all-to-all with 3 others, 1 of them
    # in-host, then nothing.
    digits = factorise(mesh_of({"x": 4}, 2))
    step = Step(kind="all_to_all", digits=(0, 1), donor=1, receivers=(0, 0))
    assert cost.exchange_cost(
        [step], start_bytes=400, result_bytes=400, digits=digits
    ) == cost.ExchangeCost(
        in_host_bytes=100,
        cross_host_bytes=200,
        num_collectives=1,
        # The argument, what is sent, what arrives, and that joined.
        peak_bytes=1600,
        result_bytes=400,
    )
    gathers = [
        Step(kind="all_gather", digits=(0,), donor=None, receivers=(0,)),
        Step(kind="all_gather", digits=(1,), donor=None, receivers=(0,)),
    ]
    found = cost.exchange_cost(
        gathers, start_bytes=100, result_bytes=400, digits=digits
    )
    assert (found.cross_host_bytes, found.in_host_bytes) == (100, 200)
    assert found.peak_bytes == 100 + 400 + 400
    # Padding is cut off from a block in the new order, perhaps a turned one.
    found = cost.exchange_cost(
        gathers, start_bytes=100, result_bytes=300, digits=digits
    )
    assert found.peak_bytes == 100 + 3 * 400 + 300
    # Several leaves are cut apart from such a block, too.
    found = cost.exchange_cost(
        gathers, start_bytes=100, result_bytes=400, digits=digits, num_results=2
    )
    assert found.peak_bytes == 100 + 2 * 400 + 400
    half = [Step(kind="slice", digits=(0,), donor=0, receivers=())]
    found = cost.exchange_cost(half, start_bytes=100, result_bytes=50, digits=digits)
    assert (found.num_collectives, found.in_host_bytes, found.cross_host_bytes) == (
        0,
        0,
        0,
    )


def test_nothing_to_do_costs_the_block_alone():
    digits = factorise(mesh_of({"x": 4}, 2))
    found = cost.exchange_cost([], start_bytes=8, result_bytes=8, digits=digits)
    assert (found.peak_bytes, found.num_collectives) == (8, 0)


@pytest.mark.parametrize(
    ("host", "total", "requests", "profile", "seconds"),
    [
        # The slowest of link, shared storage and decoder; none of them is added.
        (1e9, 1e9, 0, CPU_FILE, 2.0),
        (1e9, 8e9, 0, CPU_FILE, 4.0),
        (1e8, 8e9, 0, CPU_OBJECT_STORE, 1.0),
        # Latency once per 128 requests.
        (0, 0, 1, CPU_OBJECT_STORE, 0.01),
        (0, 0, 128, CPU_OBJECT_STORE, 0.01),
        (0, 0, 129, CPU_OBJECT_STORE, 0.02),
        (0, 0, 0, CPU_OBJECT_STORE, 0.0),
    ],
)
def test_read_seconds(host, total, requests, profile, seconds):
    found = cost.read_seconds(
        max_host_bytes=host, total_bytes=total, num_requests=requests, profile=profile
    )
    assert found == pytest.approx(seconds)


def test_exchange_and_place_seconds():
    spent = cost.ExchangeCost(
        in_host_bytes=10**9,
        cross_host_bytes=10**9,
        num_collectives=5,
        peak_bytes=0,
        result_bytes=0,
    )
    # 1 s inside, 2 devices share 0.25 GB/s to other hosts: 8 s, 5 launches of 2 ms.
    found = cost.exchange_seconds(spent, devices_per_host=2, profile=CPU_FILE)
    assert found == pytest.approx(1 + 8 + 0.01)
    quick = dataclasses.replace(CPU_FILE, cross_host_bytes_per_second=1e12)
    assert cost.exchange_seconds(spent, devices_per_host=2, profile=quick) < 1.1
    assert cost.place_seconds(host_bytes=8e9, profile=CPU_FILE) == pytest.approx(2.0)

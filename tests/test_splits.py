"""The axis splits of intermediate shardings, against brute force and by example."""

import doctest
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intermediate_oracle import brute_force, keeps_shards, layouts

from orbax_reshard.planning import splits
from orbax_reshard.planning.splits import MeshAxis, plan_splits, shard_counts

# Brute force over 96 devices is at most a few thousand splits.
MAX_PLANNED_DEVICES = 96


def test_the_oracle_knows_what_keeps_a_shard():
    # Major axis halved: rows 0 and 2 of 4 would be one piece, and are not neighbours.
    assert not keeps_shards((2, 2), (2, 1))
    assert keeps_shards((2, 2), (1, 2))
    assert keeps_shards((4, 3), (2, 3))
    assert not keeps_shards((4, 4), (2, 2))
    # An axis of size 1 to the right is gathered whole without doing anything.
    assert keeps_shards((4, 1), (2, 1))


@pytest.mark.parametrize("source", range(1, 13))
@pytest.mark.parametrize("target", range(1, 13))
def test_direct_when_target_cuts_are_source_cuts(source, target):
    source_cuts = {Fraction(cut, source) for cut in range(source)}
    target_cuts = {Fraction(cut, target) for cut in range(target)}
    expected = (
        splits.SOURCE_NOT_FINER
        if source <= target
        else splits.TARGET_SHARDS_WHOLE
        if target_cuts <= source_cuts
        else None
    )
    assert splits.direct_reason((source,), (target,)) == expected
    # A dimension that nobody cuts changes nothing.
    assert splits.direct_reason((source, 1), (target, 1)) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_plan_receives_least_and_prefers_what_the_target_gathers(data):
    axes, dims = data.draw(layouts(max_devices=MAX_PLANNED_DEVICES))
    source = shard_counts(axes, dims)
    target = tuple(data.draw(st.integers(1, 12)) for _ in dims)
    plan = plan_splits(axes, dims, target)

    # It is a way that loses nothing ...
    left = shard_counts(plan.axes, plan.dims)
    ways = brute_force(axes, dims)
    assert left in ways
    replicas = {axis.name: n for axis, n in zip(axes, plan.num_replicas, strict=True)}
    sizes = {axis.name: axis.size for axis in axes}
    for names in dims:
        assert keeps_shards([sizes[n] for n in names], [replicas[n] for n in names])
    # ... with the most shards among those not above the target's ...
    allowed = [way for way in ways if math.prod(way) <= math.prod(target)]
    most = max(map(math.prod, allowed))
    assert plan.num_shards == most
    assert plan.num_source_shards == math.prod(source)
    assert plan.received_fraction == Fraction(1, most) - Fraction(1, math.prod(source))

    # ... gathering least where the target has as many shards or more.
    def unwanted(way):
        return math.prod(
            s // w for s, w, t in zip(source, way, target, strict=True) if s <= t
        )

    assert unwanted(left) == min(unwanted(w) for w in allowed if math.prod(w) == most)
    # Split in place: axes and their order are the source's.
    joined = [
        math.prod(axis.size for axis in group)
        for _, group in itertools.groupby(
            plan.axes, lambda axis: axis.name.split("_")[0]
        )
    ]
    assert joined == [axis.size for axis in axes]


@pytest.mark.parametrize(
    ("sizes", "dims", "target", "replicas"),
    [
        # Rule 1: the second dimension has shards too many, the first too few.
        ((4, 4), (("a0",), ("a1",)), (8, 1), (1, 2)),
        ((4, 4), (("a0",), ("a1",)), (1, 8), (2, 1)),
        # Rule 1 beats rule 3: two axes where s > t rather than one where s < t.
        ((2, 2, 4), (("a0", "a1"), ("a2",)), (1, 5), (2, 2, 1)),
        # Rule 1 beats rule 2: (1, 1, 3, 2) would overshoot less, but s == t for a3.
        ((2, 3, 3, 2), (("a0", "a1"), ("a2",), ("a3",)), (5, 1, 2), (2, 3, 1, 1)),
        # Rule 2: with (1, 4) the target would have to cut the second dimension again.
        ((4, 4, 1), (("a0",), ("a1",), ("a2",)), (1, 2, 2), (4, 1, 1)),
        # Rule 3: one axis gathered rather than a part of each.
        ((4, 2, 1), (("a0",), ("a1",), ("a2",)), (1, 1, 3), (4, 1, 1)),
        # Rule 4: all the same, so the minor axis of the mesh ...
        ((4, 4, 1), (("a0",), ("a1",), ("a2",)), (1, 1, 5), (1, 4, 1)),
        # ... also when it cuts the first dimension.
        ((4, 4, 1), (("a1",), ("a0",), ("a2",)), (1, 1, 5), (1, 4, 1)),
        # Tuples: the minor axis is the last of the *tuple*, not of the mesh.
        ((2, 4), (("a1", "a0"), ()), (1, 4), (2, 1)),
        ((2, 4), (("a0", "a1"), ()), (1, 4), (1, 2)),
        # The minor axis whole, then a part of the next.
        ((4, 3), (("a0", "a1"), ()), (1, 2), (2, 3)),
        # 4 shards, although 5 are allowed.
        ((4, 3), (("a0", "a1"), ()), (1, 5), (1, 3)),
        # 6 shards: half of the minor axis is gathered ...
        ((3, 4), (("a0", "a1"), ()), (1, 7), (1, 2)),
        # ... but 4 when it is the major one: half of it with no 3 would lose shards.
        ((4, 3), (("a0", "a1"), ()), (1, 7), (1, 3)),
    ],
)
def test_preferences(sizes, dims, target, replicas):
    axes = tuple(MeshAxis(name=f"a{i}", size=n) for i, n in enumerate(sizes))
    assert plan_splits(axes, dims, target).num_replicas == replicas


def test_a_replica_part_must_divide_its_axis():
    with pytest.raises(ValueError) as error:
        splits.AxisSplits(
            source_axes=(MeshAxis(name="a", size=4),),
            source_dims=(("a",),),
            num_replicas=(3,),
        )
    assert str(error.value) == (
        "axis 'a' of size 4 has no replica part of size 3; it must divide the axis"
    )


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(splits)
    assert result.attempted > 0
    assert result.failed == 0

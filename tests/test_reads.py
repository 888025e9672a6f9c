"""The closed form of "who reads which chunks" against Python sets."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import chunks_per_host, fixed, layouts, mesh_of

from orbax_reshard.planning import reads
from orbax_reshard.planning.candidates import GroupShape, target_intermediate
from orbax_reshard.planning.digits import factorise
from orbax_reshard.planning.layout import make_intermediate
from orbax_reshard.planning.reads import count_reads


def check(digits, group, intermediate, encoded) -> None:
    found = count_reads(intermediate, group.chunk_shape, digits, encoded)
    expected = chunks_per_host(intermediate, digits, group.chunk_shape)
    assert found.chunks == tuple(len(own) for own, _ in expected.values())
    assert found.box_chunks == tuple(repeated for _, repeated in expected.values())
    if encoded is None:
        assert found.encoded_bytes is None
    else:
        assert found.encoded_bytes == tuple(
            sum(int(encoded[at]) for at in own) for own, _ in expected.values()
        )


@fixed(400)
@given(layouts(), st.booleans())
def test_counts_against_sets(layout, with_sizes):
    digits, group, intermediate = layout
    encoded = None
    if with_sizes:
        # Powers of two up to 2^40: two different sets of few chunks differ in sum.
        count = np.arange(group.num_chunks, dtype=np.int64)
        encoded = (1 << (count % 40)).reshape(group.grid_shape)
    check(digits, group, intermediate, encoded)


@fixed(200)
@given(layouts())
def test_walking_over_devices_gives_the_closed_form(layout):
    digits, group, intermediate = layout
    sizes = np.arange(1, group.num_chunks + 1, dtype=np.int64)
    arguments = intermediate, group.chunk_shape, digits, sizes.reshape(group.grid_shape)
    if digits.regular:
        assert count_reads(*arguments) == reads._enumerate_reads(*arguments)


def test_both_kinds_of_mesh_are_drawn():
    # Otherwise the two tests above would prove half of what they say.
    seen = set()

    @fixed(100)
    @given(layouts())
    def collect(layout):
        seen.add((layout[0].regular, len(layout[0].mesh.host_ids) > 1))

    collect()
    assert seen >= {(True, True), (True, False), (False, True)}


def test_a_chunk_that_two_boxes_of_a_host_share():
    # 2 hosts x 2 devices, columns: every box touches all 4 row chunks.
    mesh = mesh_of({"x": 4}, 2)
    digits = factorise(mesh)
    group = GroupShape(
        shape=(1, 8, 8),
        chunk_shape=(1, 2, 8),
        element_bytes=4,
        moved_bytes=4,
        target=((), (), (0, 1)),
    )
    found = count_reads(target_intermediate(group, digits), group.chunk_shape, digits)
    assert (found.chunks, found.box_chunks) == ((4, 4), (8, 8))


def test_padding_is_read_by_nobody():
    mesh = mesh_of({"x": 4}, 4)
    digits = factorise(mesh)
    made = make_intermediate(
        shape=(1, 4),
        chunk_shape=(1, 4),
        target=((), ()),
        digits=digits,
        num_kept=(0, 0),
        extras=((0, 1), ()),
    )
    sizes = np.array([[77]])
    found = count_reads(made, (1, 4), digits, sizes)
    assert (found.chunks, found.encoded_bytes) == ((1, 0, 0, 0), (77, 0, 0, 0))


def test_too_large_to_walk_over(monkeypatch):
    mesh = mesh_of({"x": 4}, (0, 1, 1, 0))
    digits = factorise(mesh)
    group = GroupShape(
        shape=(1, 8),
        chunk_shape=(1, 1),
        element_bytes=4,
        moved_bytes=4,
        target=((), (0, 1)),
    )
    arguments = target_intermediate(group, digits), group.chunk_shape, digits
    cells = math.prod(group.grid_shape) * 4
    monkeypatch.setattr(reads, "MAX_ENUMERATED_CELLS", cells)
    assert sum(count_reads(*arguments).chunks) == 8
    monkeypatch.setattr(reads, "MAX_ENUMERATED_CELLS", cells - 1)
    with pytest.raises(ValueError) as error:
        count_reads(*arguments)
    assert str(error.value) == (
        "4 devices in an order that mixes hosts, and 8 chunks, are too many to "
        "enumerate"
    )

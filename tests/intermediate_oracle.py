"""Random layouts, and every intermediate that they can have, by brute force.

The oracle writes every axis as split x replica in every way and counts, position by
position, which ones keep their shard. It knows neither the suffix rule nor the order
of preference of ``orbax_reshard.planning.splits``. Below it: what devices hold, as JAX
says.
"""

import itertools
import math

from hypothesis import strategies as st
from jax.sharding import NamedSharding

from orbax_reshard.planning.splits import MeshAxis

# With one prime, several, repeated and none.
AXIS_SIZES = (1, 2, 3, 4, 6, 8, 9, 12)


@st.composite
def layouts(draw, *, max_devices: int, max_rank: int = 3):
    """Axis sizes, and per dimension the axes on it in any order; some on none."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        room = max_devices // math.prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in AXIS_SIZES if n <= room])))
    rank = draw(st.integers(1, max_rank))
    dims: list[list[str]] = [[] for _ in range(rank)]
    for position in draw(st.permutations(range(len(sizes)))):
        # -1: the source is replicated over this axis.
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(f"a{position}")
    axes = tuple(MeshAxis(name=f"a{i}", size=n) for i, n in enumerate(sizes))
    return axes, tuple(map(tuple, dims))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def keeps_shards(sizes, replicas) -> bool:
    """Whether all positions of one dimension's axes keep their shard, one by one."""
    num_shards = math.prod(sizes)
    num_pieces = num_shards // math.prod(replicas)
    for digits in itertools.product(*map(range, sizes)):
        shard = piece = 0
        for digit, size, replica in zip(digits, sizes, replicas, strict=True):
            shard = shard * size + digit
            piece = piece * (size // replica) + digit // replica
        if not (
            piece * num_shards <= shard * num_pieces
            and (shard + 1) * num_pieces <= (piece + 1) * num_shards
        ):
            return False
    return True


def brute_force(axes, dims):
    """All ways to gather, as the shards left per dimension, under which none loses."""
    sizes = {axis.name: axis.size for axis in axes}
    per_dim = []
    for names in dims:
        own = [sizes[name] for name in names]
        per_dim.append(
            {
                math.prod(own) // math.prod(replicas)
                for replicas in itertools.product(*map(divisors, own))
                if keeps_shards(own, replicas)
            }
        )
    return list(itertools.product(*per_dim))


def boxes(sharding: NamedSharding, shape: tuple[int, ...]):
    """Device -> ((start, stop), ...)."""
    return {
        device: tuple(
            piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


def volume(box) -> int:
    return math.prod(stop - start for start, stop in box)


def devices_that_lose(source: NamedSharding, intermediate: NamedSharding, shape):
    """Devices whose intermediate piece does not hold all of their source shard."""
    pieces = boxes(intermediate, shape)
    return [
        device
        for device, shard in boxes(source, shape).items()
        if not all(
            piece[0] <= own[0] and own[1] <= piece[1]
            for own, piece in zip(shard, pieces[device], strict=True)
        )
    ]

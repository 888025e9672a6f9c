"""One process of a cluster that reshards live arrays; emits what each case found.

Values are compared per addressable shard with slices of the array that everybody can
compute; nothing is judged here.
"""

import contextlib
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_reshard import BudgetError, plan_reshard, reshard
from orbax_reshard.engine import exchange
from orbax_reshard.tools import launch


def sharding(sizes: dict[str, int], *spec, order="forward", devices=None):
    flat = np.array(jax.devices() if devices is None else devices, dtype=object)
    if order == "reversed":
        flat = flat[::-1]
    if order == "mixed":
        flat = np.concatenate([flat[::2], flat[1::2]])
    if order == "transposed":
        flat = flat.reshape(tuple(sizes.values())[::-1]).T
    return NamedSharding(
        Mesh(flat.reshape(tuple(sizes.values())), tuple(sizes)), P(*spec)
    )


def value(seed: int, shape=(16, 16, 16)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def array(seed: int, at: NamedSharding, shape=(16, 16, 16)) -> jax.Array:
    held = value(seed, shape)
    return jax.make_array_from_callback(shape, at, lambda index: held[index])


def equal(made: jax.Array, expected: np.ndarray, target: NamedSharding) -> bool:
    indices = target.addressable_devices_indices_map(expected.shape)
    shards = {s.device: s for s in made.addressable_shards}
    return (
        made.sharding == target
        and set(shards) == set(indices)
        and all(
            np.asarray(shards[d].data).tobytes() == expected[indices[d]].tobytes()
            for d in shards
        )
    )


def cases():
    eight = {"f": 8}
    grid = {"x": 4, "y": 2}
    rows = functools.partial(sharding, eight, "f")
    yield "rows to columns", rows(), sharding({"r": 2, "t": 4}, None, "t")
    yield "reversed", rows(), rows(order="reversed")
    yield "mixed", rows(order="mixed"), sharding({"r": 2, "t": 4}, None, "t")
    yield (
        "transposed",
        sharding(grid, "x", "y", order="transposed"),
        sharding(grid, "x", "y"),
    )
    yield "R102", sharding(grid, "y", None, "x"), sharding(grid, None, ("x", "y"), None)
    yield "replicate", rows(), sharding(eight)
    yield "slice", sharding(eight), rows()
    yield "swap", sharding(grid, "x", "y"), sharding({"y": 2, "x": 4}, "x", "y")
    yield "relabel", rows(), sharding(grid, ("x", "y"), None, None)


def main() -> None:
    launch.initialize_from_environment()
    for under in ("no mesh", "a mesh"):
        context = contextlib.nullcontext()
        if under == "a mesh":
            context = jax.set_mesh(sharding({"p": 8}).mesh)
        found = {}
        for seed, (name, source, target) in enumerate(cases()):
            made = array(seed, source)
            plan = plan_reshard(made, target)
            with context if name == "R102" else contextlib.nullcontext():
                result = reshard(made, target)
            found[name] = {
                "equal": equal(result, value(seed), target),
                "decision": plan.groups[0].decision,
                "collectives": dict(plan.forecast.collectives),
                "kept": not made.is_deleted(),
            }
        launch.emit({"under": under, "cases": found})

    # A tree: several leaves in a wave, keys, donation, and nothing compiled twice.
    source, target = sharding({"f": 8}, "f"), sharding({"r": 2, "t": 4}, "t")
    keys = jax.jit(
        lambda: jax.random.split(jax.random.key(3), 8), out_shardings=source
    )()
    numbers = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 8)))
    tree = {"leaves": [array(i, source, (8, 8)) for i in range(5)], "keys": keys}
    reshard(tree, target)
    compiled = exchange.PROGRAMS.num_compiled
    got = reshard(tree, target, donate=True)
    data = jax.random.key_data(got["keys"])
    launch.emit(
        {
            "compiled": exchange.PROGRAMS.num_compiled - compiled,
            "leaves": all(
                equal(one, value(i, (8, 8)), target)
                for i, one in enumerate(got["leaves"])
            ),
            "keys": got["keys"].sharding == target
            and all(
                np.array_equal(np.asarray(s.data), numbers[s.index])
                for s in data.addressable_shards
            ),
            "deleted": all(x.is_deleted() for x in jax.tree.leaves(tree)),
        }
    )

    # Each process for itself: its own devices, to others of its own.
    local = jax.local_devices()
    half = len(local) // 2
    here = sharding({"f": half}, "f", devices=local[:half])
    there = sharding({"t": half}, None, "t", devices=local[half:])
    mine = jax.device_put(value(7, (8, 8)), here)
    launch.emit({"local": equal(reshard(mine, there), value(7, (8, 8)), there)})

    # One error on every process, and nobody waits for anybody.
    try:
        reshard(array(0, source), target, device_budget_bytes=1000)
    except BudgetError as error:
        launch.emit({"budget": str(error)})


if __name__ == "__main__":
    main()

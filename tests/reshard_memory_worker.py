"""Runs on 64 CPU devices: what XLA says of our programs and of plain ``jit``.

Emits one object per case; nothing is judged here. ``memory`` compiles only, ``random``
compares the bytes that go through all-gathers over random layouts.
"""

import math
import random
import re
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_reshard import plan_reshard, reshard
from orbax_reshard.engine import exchange
from orbax_reshard.tools import launch

WIDTHS = {"f32": 4, "u32": 4, "s32": 4, "u8": 1, "pred": 1}
GATHERED = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* all-gather(?:-start)?\(")


def gathered_bytes(hlo: str) -> int:
    """Bytes of the results of all all-gathers in compiled HLO."""
    return sum(
        math.prod(int(n) for n in extents.split(",") if n) * WIDTHS[kind]
        for kind, extents in GATHERED.findall(hlo)
    )


def total_bytes(memory) -> int:
    """Argument, output and temporaries, what they share counted once."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def plain(shape, source, target) -> dict:
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=source)
    compiled = jax.jit(lambda x: x, out_shardings=target).lower(struct).compile()
    return {
        "peak": total_bytes(compiled.memory_analysis()),
        "gathered": gathered_bytes(compiled.as_text()),
    }


def ours(shape, source, target) -> dict:
    """Of the very program that `reshard` runs, and of the plan before it."""
    texts = []
    count = exchange.count_collectives

    def remember(text):
        texts.append(text)
        return count(text)

    exchange.count_collectives, exchange.PROGRAMS = remember, exchange.ProgramCache()
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array = jax.device_put(value, source)
    plan = plan_reshard(array, target)
    made = reshard(array, target)
    exchange.count_collectives = count
    equal = all(
        np.array_equal(np.asarray(shard.data), np.asarray(array)[shard.index])
        for shard in made.addressable_shards
    )
    programs = list(exchange.PROGRAMS._programs.values())
    return {
        "peak": max((p.peak_bytes for p in programs), default=0),
        "gathered": sum(map(gathered_bytes, texts)),
        "collectives": [dict(p.collectives) for p in programs],
        "planned": dict(plan.forecast.collectives),
        "planned_peak": plan.peak_device_bytes,
        "decision": plan.groups[0].decision,
        "equal": equal and made.sharding == target,
    }


def sharding(sizes: dict[str, int], *spec) -> NamedSharding:
    count = math.prod(sizes.values())
    devices = np.array(jax.devices()[:count], dtype=object)
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    return NamedSharding(mesh, P(*spec))


def named_cases():
    square = (2048, 2048)  # 16 MiB
    for count, split in ((64, 8), (64, 16), (8, 4)):
        yield (
            f"{count} to {split} x {count // split}",
            square,
            sharding({"f": count}, "f", None),
            sharding({"r": count // split, "t": split}, None, "t"),
        )
    yield (
        "R102",
        (16, 16, 16),
        sharding({"x": 4, "y": 2}, "y", None, "x"),
        sharding({"x": 4, "y": 2}, None, ("x", "y"), None),
    )


def random_cases(count: int):
    rng = random.Random(0)
    shapes = [(8,), (2, 4), (4, 2), (2, 2, 2)]
    for number in range(count):
        rank = rng.choice([1, 2, 2, 3])

        def one(rank=rank):
            shape = rng.choice(shapes)
            dims = [[] for _ in range(rank)]
            for axis in rng.sample("abc"[: len(shape)], len(shape)):
                dim = rng.randrange(-1, rank)
                if dim >= 0:
                    dims[dim].append(axis)
            spec = [tuple(d) or None for d in dims]
            return sharding(dict(zip("abc", shape, strict=False)), *spec)

        yield f"random {number}", (64,) * rank, one(), one()


if __name__ == "__main__":
    launch.initialize_from_environment()
    cases = named_cases() if sys.argv[1] == "named" else random_cases(int(sys.argv[1]))
    for name, shape, source, target in cases:
        launch.emit(
            {
                "name": name,
                "layouts": f"{source.mesh.shape} {source.spec} to "
                f"{target.mesh.shape} {target.spec}",
                "plain": plain(shape, source, target),
                "ours": ours(shape, source, target),
            }
        )

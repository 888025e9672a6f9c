"""Bytes per device for one 16 MiB float32 array, with 64 devices; prints JSON.

Run by `test_exchange_memory.py` in a process of its own, because the other tests have
16 devices. Rows on the intermediate, columns and replicas on the target, which is the
case of docs/design.md, section 3.
"""

import json
import os
import sys

NUM_DEVICES = 64
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from exchange_oracle import compiled, devices_of, sharding_of  # noqa: E402
from planning_oracle import mesh_of  # noqa: E402

from orbax_reshard.engine.exchange import _peak_bytes, digit_mesh  # noqa: E402
from orbax_reshard.engine.exchange import count_collectives as count  # noqa: E402
from orbax_reshard.engine.exchange import layout_sharding as over  # noqa: E402
from orbax_reshard.planning.cost import exchange_cost  # noqa: E402
from orbax_reshard.planning.digits import factorise  # noqa: E402
from orbax_reshard.planning.layout import block_bytes, make_intermediate  # noqa: E402

SHAPE = (2048, 2048)


def measure(columns: int, replicas: int, hosts: int) -> dict[str, object]:
    """Rows over all devices to ``columns`` x ``replicas``, both ways."""
    digits = factorise(mesh_of({"t": columns, "r": replicas}, hosts))
    target = ((), (), digits.digits_of_axis("t"))
    made = make_intermediate(
        shape=(1, *SHAPE),
        chunk_shape=(1, SHAPE[0] // digits.mesh.num_devices, SHAPE[1]),
        target=target,
        digits=digits,
        num_kept=(0, 0, 0),
        extras=((), tuple(range(len(digits.sizes))), ()),
    )
    result = SHAPE[0] * SHAPE[1] * 4 // columns
    forecast = exchange_cost(
        made.steps(digits),
        start_bytes=block_bytes(made, 4),
        result_bytes=result,
        digits=digits,
    )
    program = compiled(made, digits, np.dtype("float32"))
    mesh = digit_mesh(digits, devices_of(digits))
    source = over(mesh, digits, made.layout[1:])
    plain = (
        jax.jit(lambda x: x, out_shardings=sharding_of(digits, ((), ("t",))))
        .lower(jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=source))
        .compile()
    )
    return {
        "steps": [step.hlo_name for step in made.steps(digits)],
        "collectives": program.collectives,
        "bytes": program.peak_bytes,
        "forecast": forecast.peak_bytes,
        "plain": _peak_bytes(plain.memory_analysis()),
        "plain_collectives": count(plain.as_text()),
    }


if __name__ == "__main__":
    cases = [(8, 8, 16), (4, 2, 4)]
    json.dump([measure(*case) for case in cases], sys.stdout)

"""A process of a cluster that restores what cannot be restored, and says what it got.

Usage: ``python failure_worker.py JOB``; JOB is a JSON list of cases. A case has an
``id`` and, one per host (the last one is that of all further hosts), ``paths``,
``options`` and ``targets``: what is asked for, leaf to (shape, spec). With ``stock``
the restore is done with stock Orbax too, and the two are compared.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from restore_worker import storage_bytes

from orbax_reshard.tools import launch


def outcome(restore: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """What a restore came to: its error, or None; bytes and seconds that it took."""
    before, start = storage_bytes(), time.monotonic()
    error, tree = None, None
    try:
        tree = restore()
    except Exception as raised:
        error = raised
    said = {
        "error": error and type(error).__name__,
        "bases": [] if error is None else [c.__name__ for c in type(error).__mro__],
        "code": getattr(error, "code", None),
        "message": str(error),
        "fetched": storage_bytes() - before,
        "seconds": time.monotonic() - start,
    }
    return said, tree


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case on this host."""
    import jax
    import numpy as np
    import scenarios

    import orbax_reshard as oresh

    def own(given: list[Any]) -> Any:
        return given[min(jax.process_index(), len(given) - 1)]

    mesh = scenarios.mesh_of({"x": 8})
    target = {
        name: jax.ShapeDtypeStruct(
            tuple(shape), np.float32, sharding=scenarios.sharding_of(mesh, tuple(spec))
        )
        for name, (shape, spec) in own(case["targets"]).items()
    }

    path = own(case["paths"])

    def planned() -> Any:
        options = {"policy": "read_once"} | own(case["options"])
        handler = oresh.ReshardingArrayHandler(oresh.Options(**options))
        return scenarios.restore(path, target, handler)

    said, tree = outcome(planned)
    said["id"] = case["id"]
    if case["stock"]:
        said["stock"], stock = outcome(lambda: scenarios.restore(path, target))
        if tree is not None and stock is not None:
            said["difference"] = scenarios.difference(stock, tree)
    return said


def main() -> None:
    """Runs all cases, one after the other, in one process: each finds it usable."""
    launch.initialize_from_environment()
    for case in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        launch.emit(run(case))


if __name__ == "__main__":
    main()

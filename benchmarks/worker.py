"""One process of a benchmark: restores every case in every way, and says what it saw.

Run by ``benchmarks.run`` as ``python -m benchmarks.worker TASK``; TASK is JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from orbax_reshard.tools import bits, demo_checkpoint, launch


def main(task: dict[str, Any]) -> None:
    """Saves, or restores all cases in alternation."""
    leaves = demo_checkpoint.transformer(task["size_bytes"])
    if task["action"] == "save":
        demo_checkpoint.save(task["path"], leaves)
        stored = demo_checkpoint.stored_chunk_bytes(task["path"])
        launch.emit({"stored_bytes": stored})
        return
    launch.initialize_from_environment()
    for repeat in range(task["repeats"]):
        for number, case in enumerate(task["cases"]):
            target = demo_checkpoint.abstract_tree(
                leaves, demo_checkpoint.mesh(tuple(case))
            )
            ways = list(task["ways"])
            turn = (repeat + number) % len(ways)
            results: dict[str, Any] = {}
            for way in ways[turn:] + ways[:turn]:
                results[way] = _restore(task, target, case, way, repeat)
            for way in ways[1:]:
                _compare(case, way, results[ways[0]], results[way])


def _restore(
    task: dict[str, Any], target: Any, case: list[int], way: str, repeat: int
) -> Any:
    import jax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    from orbax_reshard.engine import metadata

    handler = _handler(way)
    tree_handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, handler)
        )
    )
    args = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
    )
    multihost_utils.sync_global_devices(f"{case} {way} {repeat}")
    before, start = metadata.fetched_bytes(), time.perf_counter()
    tree = jax.block_until_ready(tree_handler.restore(_path(task["path"]), args=args))
    seconds = time.perf_counter() - start
    facts: dict[str, Any] = {
        "case": case,
        "way": way,
        "repeat": repeat,
        "seconds": seconds,
        "fetched_bytes": metadata.fetched_bytes() - before,
        "peak_resident_bytes": 1024
        * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    report = getattr(handler, "last_report", None)
    if report is not None:
        facts |= {
            "reasons": report.reasons,
            "forecast_seconds": report.forecast.seconds,
            "read_seconds": report.read_seconds,
            "exchange_seconds": report.exchange_seconds,
            "compile_seconds": report.compile_seconds,
            "num_compiled": report.num_compiled,
            "collectives": report.collectives,
        }
    launch.emit(facts)
    return tree


def _path(text: str) -> Any:
    from etils import epath

    return epath.Path(text)


def _handler(way: str) -> Any:
    import orbax.checkpoint as ocp

    import orbax_reshard as oresh

    if way == "stock":
        return ocp.type_handlers.ArrayHandler()
    return oresh.ReshardingArrayHandler(oresh.Options(policy=way))


def _compare(case: list[int], way: str, stock: Any, other: Any) -> None:
    import jax

    pairs = zip(
        jax.tree_util.tree_leaves_with_path(stock), jax.tree.leaves(other), strict=True
    )
    different = [
        jax.tree_util.keystr(path)
        for (path, one), two in pairs
        if bits.describe_difference(one, two) is not None
    ]
    launch.emit({"case": case, "way": way, "different": different})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A process of a test cluster: restores scenarios both ways and says what it saw.

Usage: ``python restore_worker.py JOB``; JOB is a JSON file with a list of scenarios,
each with the path of its checkpoint. With one process and ``"save": true`` it saves
the checkpoints instead.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from orbax_reshard.tools import launch


def run(plain: dict[str, Any]) -> dict[str, Any]:
    """One scenario, stock first, then planned."""
    import scenarios

    import orbax_reshard as oresh
    from orbax_reshard.engine import exchange, metadata

    path = plain.pop("path")
    policy = plain.pop("policy", "read_once")
    repeats = plain.pop("repeats", 1)
    scenario = scenarios.from_json(plain)
    target = scenarios.target_tree(scenario)
    before = metadata.fetched_bytes()
    start = time.monotonic()
    stock = scenarios.restore(path, target)
    stock_seconds = time.monotonic() - start
    stock_bytes = metadata.fetched_bytes() - before
    handler = oresh.ReshardingArrayHandler(oresh.Options(policy=policy))
    compiled = []
    for _ in range(repeats):
        already = exchange.PROGRAMS.num_compiled
        start = time.monotonic()
        planned = scenarios.restore(path, target, handler)
        planned_seconds = time.monotonic() - start
        compiled.append(exchange.PROGRAMS.num_compiled - already)
    report, plan = handler.last_report, handler.last_plan
    assert report is not None and plan is not None
    asked = all(planned[name].sharding == t.sharding for name, t in target.items())
    return {
        "id": scenario.id,
        "difference": scenarios.difference(stock, planned),
        "as_asked": asked,
        "stock_bytes": stock_bytes,
        "stock_seconds": stock_seconds,
        "seconds": planned_seconds,
        "report": json.loads(report.to_json()),
        "plan": plan.to_json(),
        "compiled": compiled,
        "num_programs": report.num_programs,
    }


def main() -> None:
    """Runs the job; a scenario that raises is told like any other result."""
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if job.get("save"):
        import scenarios

        for plain in job["scenarios"]:
            path = plain.pop("path")
            plain.pop("policy", None)
            scenarios.save(scenarios.from_json(plain), path)
        return
    launch.initialize_from_environment()
    for plain in job["scenarios"]:
        name = plain["id"]
        try:
            launch.emit(run(plain))
        except Exception as error:
            launch.emit(
                {
                    "id": name,
                    "error": type(error).__name__,
                    "message": str(error),
                    "trace": traceback.format_exc(),
                }
            )


if __name__ == "__main__":
    main()

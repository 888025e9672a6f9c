"""A process of a test cluster: restores scenarios both ways and says what it saw.

Usage: ``python restore_worker.py JOB``; JOB is a JSON file with a list of scenarios,
each with the path of its checkpoint. With one process and ``"save": true`` it saves
the checkpoints instead.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
import traceback
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from orbax_reshard.tools import launch

# What compiled HLO calls collectives; written here again, so that the library's own
# count is checked and not trusted.
COLLECTIVE = re.compile(
    r"^ *(?:ROOT )?%?[\w.-]+ = .*? (all-gather|all-to-all|all-reduce|reduce-scatter"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\(",
    re.MULTILINE,
)


def storage_bytes() -> int:
    """Bytes that TensorStore has read from any storage in this process so far."""
    import tensorstore as ts

    return sum(
        int(value["value"])
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
        if metric["name"].endswith("/bytes_read")
        for value in metric["values"]
    )


def run(plain: dict[str, Any], path: str) -> dict[str, Any]:
    """One scenario, stock first, then planned."""
    import scenarios

    import orbax_reshard as oresh
    from orbax_reshard.engine import exchange

    scenario = scenarios.from_json(plain)
    target = scenarios.target_tree(scenario)
    before, start = storage_bytes(), time.monotonic()
    stock = scenarios.restore(path, target)
    stock_seconds = time.monotonic() - start
    stock_bytes = storage_bytes() - before
    handler = oresh.ReshardingArrayHandler(oresh.Options(policy=scenario.policy))
    compiled, planned_anew, differences = [], [], []
    for _ in range(scenario.repeats):
        programs = exchange.PROGRAMS.num_compiled
        kept = handler.last_plan
        before, start = storage_bytes(), time.monotonic()
        planned = scenarios.restore(path, target, handler)
        seconds = time.monotonic() - start
        planned_bytes = storage_bytes() - before
        compiled.append(exchange.PROGRAMS.num_compiled - programs)
        planned_anew.append(handler.last_plan is not kept)
        differences.append(scenarios.difference(stock, planned))
    report, plan = handler.last_report, handler.last_plan
    assert report is not None and plan is not None
    return {
        "id": scenario.id,
        "difference": next(filter(None, differences), None),
        "not_as_asked": [
            name for name, t in target.items() if planned[name].sharding != t.sharding
        ],
        "stock_bytes": stock_bytes,
        "stock_seconds": stock_seconds,
        "planned_bytes": planned_bytes,
        "seconds": seconds,
        "report": json.loads(report.to_json()),
        "reasons": {leaf.name: [leaf.decision, leaf.reason] for leaf in report.leaves},
        "plan": plan.to_json(),
        "num_signatures": len(plan.planned),
        "compiled": compiled,
        "planned_anew": planned_anew,
    }


def programs() -> list[dict[str, Any]]:
    """Every program of this process: the collectives planned, and those in its HLO."""
    from orbax_reshard.engine import exchange

    return [
        {
            "planned": Counter(
                s.kind.replace("_", "-") for s in key.steps if s.kind != "slice"
            ),
            "compiled": Counter(COLLECTIVE.findall(program.run.as_text())),
            "counted": dict(program.collectives),
        }
        for key, program in exchange.PROGRAMS._programs.items()
    ]


def main() -> None:
    """Runs the job; a scenario that raises is told like any other result."""
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if job.get("save"):
        import scenarios

        for path, plain in job["scenarios"]:
            scenarios.save(scenarios.from_json(plain), path)
        return
    if os.environ[launch.NUM_PROCESSES_VARIABLE] != "1":
        launch.initialize_from_environment()
    for path, plain in job["scenarios"]:
        try:
            launch.emit(run(plain, path))
        except Exception as error:
            launch.emit(
                {
                    "id": plain["id"],
                    "error": type(error).__name__,
                    "message": str(error),
                    "trace": traceback.format_exc(),
                }
            )
    launch.emit({"id": "programs", "programs": programs()})


if __name__ == "__main__":
    main()

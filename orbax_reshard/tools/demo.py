"""The demo: one small checkpoint, three other topologies, stock against planned.

Nothing is taken from elsewhere: `run` makes a transformer-shaped checkpoint with one
process of 32 virtual devices, starts a cluster of local processes once, restores the
checkpoint in it onto each target mesh with the stock handler and with the plugin, and
compares every shard bit for bit. Stock goes first on the first and third target,
planned on the second (`demo_worker.ways_in_order`).

What the numbers mean. Bytes are what TensorStore's own counters say was read, per
process, for both ways; they are the same on a real cluster. Seconds are those of this
machine, where storage is the page cache and all hosts share the processors: they show
that the exchange is not free, and say nothing about a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Generator
from typing import Any

from orbax_reshard.errors import OptionsError
from orbax_reshard.planning.plan import Policy
from orbax_reshard.tools import demo_checkpoint, demo_worker, launch

# Units of a progress bar: save, start, and per target two restores and a comparison.
_STEPS_BEFORE_TARGETS = 2
_STEPS_PER_TARGET = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One restore, as measured over all hosts.

    Attributes:
        fetched_bytes_per_host: read from storage by each process, by process index.
        amplification: all fetched bytes / stored bytes; 1.0 is perfect.
        collectives: how many of each kind the exchange ran; empty for stock.
        seconds: of the slowest host.
        compile_seconds: spent compiling on the busiest host, partly behind reads; the
            same restore again in the same process would compile nothing.
        reasons: how many leaves were decided for which reason; empty for stock.
    """

    fetched_bytes_per_host: tuple[int, ...]
    amplification: float
    collectives: dict[str, int]
    seconds: float
    compile_seconds: float
    reasons: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """Both restores onto one target mesh.

    Attributes:
        mesh: sizes of data, fsdp and tensor.
        first: the way that was measured first.
        stock: the restore with Orbax's own handler.
        planned: the restore with this package's handler.
        num_shards: shards compared, on all devices.
        differences: per differing leaf and host: ``process``, ``leaf``, ``what``.
    """

    mesh: tuple[int, ...]
    first: str
    stock: Measured
    planned: Measured
    num_shards: int
    differences: tuple[dict[str, Any], ...]

    @property
    def label(self) -> str:
        """The mesh as one word, such as ``2-2-2``."""
        return "-".join(map(str, self.mesh))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All that the demo found; `to_json` is the document of ``--json``.

    Attributes:
        num_processes: hosts of the cluster.
        devices_per_process: devices of each host.
        policy: of the planned restores.
        num_leaves: arrays in the checkpoint.
        array_bytes: size of their values.
        stored_bytes: size of the checkpoint's chunks on disk.
        targets: the results, in the order in which they were measured.
    """

    num_processes: int
    devices_per_process: int
    policy: Policy
    num_leaves: int
    array_bytes: int
    stored_bytes: int
    targets: tuple[TargetResult, ...]

    @property
    def equal(self) -> bool:
        """Whether no bit differed anywhere."""
        return not any(target.differences for target in self.targets)

    def sentences(self) -> list[str]:
        """One sentence per difference: leaf, target, host, and both values."""
        return [
            f"Leaf {difference['leaf']} on target {target.label} differs on host "
            f"{difference['process']}: {difference['what']}."
            for target in self.targets
            for difference in target.differences
        ]

    def to_json(self) -> str:
        """The result as one JSON document, with stable names."""
        document = dataclasses.asdict(self)
        document["saved_mesh"] = demo_checkpoint.SAVED_MESH
        document["axis_names"] = demo_checkpoint.AXIS_NAMES
        document["equal"] = self.equal
        return json.dumps(document, indent=2)


def target_meshes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """All replicas, all tensor, and a mix of the three, for a power of two.

    Example:
        >>> target_meshes(8)
        ((8, 1, 1), (1, 1, 8), (2, 2, 2))
        >>> target_meshes(4)
        ((4, 1, 1), (1, 1, 4), (1, 2, 2))
    """
    mixed = [1, 1, 1]
    for digit in range(num_devices.bit_length() - 1):
        mixed[(1, 2, 0)[digit % 3]] *= 2  # fsdp, tensor, data, and again
    return (num_devices, 1, 1), (1, 1, num_devices), tuple(mixed)


def run(
    *,
    num_processes: int = 4,
    devices_per_process: int = 2,
    size_bytes: int = 64_000_000,
    policy: Policy = "read_once",
    keep: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 600.0,
    on_step: Callable[[str, int, int], None] | None = None,
) -> DemoResult:
    """Runs the demo; nothing is left behind, whatever happens.

    Args:
        num_processes: hosts to play.
        devices_per_process: virtual CPU devices of each; all hosts' devices together
            must be a power of two from 2 to 16.
        size_bytes: of the checkpoint, met to about one layer.
        policy: of the planned restores: ``read_once``, ``auto`` or ``direct``.
        keep: a folder in which the checkpoint stays, as ``checkpoint``; by default it
            is in a temporary folder, which is removed.
        timeout_seconds: for saving, and again for all restores.
        on_step: called as ``on_step(text, done, total)`` when something begins.

    Returns:
        What was measured. That bits differ is a result, not an error.

    Raises:
        OptionsError: the cluster or the folder cannot be used.
        ClusterError: a process failed or ran out of time.
    """
    num_devices = num_processes * devices_per_process
    allowed = [2**power for power in range(1, demo_checkpoint.MAX_DEVICES.bit_length())]
    if num_devices not in allowed:
        raise OptionsError(
            f"{num_processes} processes with {devices_per_process} devices each make "
            f"{num_devices} devices, but the demo's arrays divide over "
            f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]} devices.",
            code="demo_devices",
        )
    targets = target_meshes(num_devices)
    progress = _Progress(on_step, targets, num_processes)

    with _folder(keep) as folder:
        task = demo_worker.Task(
            action="save", path=str(folder / "checkpoint"), size_bytes=size_bytes
        )
        progress.say("Saving a checkpoint from a 4-8-1 mesh of 32 devices")
        num_saving = math.prod(demo_checkpoint.SAVED_MESH)
        (saved,) = _run_worker(task, 1, num_saving, timeout_seconds)
        progress.say(f"Starting {num_processes} processes")
        results = _run_worker(
            dataclasses.replace(task, action="restore", targets=targets, policy=policy),
            num_processes,
            devices_per_process,
            timeout_seconds,
            progress.hear,
        )
    leaves = demo_checkpoint.transformer(size_bytes)
    stored_bytes = saved.messages[0]["stored_bytes"]
    return DemoResult(
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        policy=policy,
        num_leaves=len(leaves),
        array_bytes=sum(leaf.num_bytes for leaf in leaves),
        stored_bytes=stored_bytes,
        targets=tuple(
            _gather(results, index, sizes, stored_bytes)
            for index, sizes in enumerate(targets)
        ),
    )


@contextlib.contextmanager
def _folder(keep: str | os.PathLike[str] | None) -> Generator[pathlib.Path]:
    """The folder to work in: temporary, or the user's own."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="orbax-reshard-demo-") as name:
            yield pathlib.Path(name)
        return
    folder = pathlib.Path(keep).absolute()
    if (folder / "checkpoint").exists():
        raise OptionsError(
            f"{folder / 'checkpoint'} exists already; name another folder to keep the "
            "demo's checkpoint in, or remove it.",
            code="demo_folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _run_worker(
    task: demo_worker.Task,
    num_processes: int,
    devices_per_process: int,
    timeout_seconds: float,
    on_message: Callable[[int, Any], None] | None = None,
) -> tuple[launch.ProcessResult, ...]:
    results = launch.run_cluster(
        ("-m", demo_worker.__name__, json.dumps(dataclasses.asdict(task))),
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        timeout_seconds=timeout_seconds,
        on_message=on_message,
    )
    launch.raise_for_failure(results)
    return results


class _Progress:
    """Turns what process 0 says into steps; all processes do the same."""

    def __init__(
        self,
        on_step: Callable[[str, int, int], None] | None,
        targets: tuple[tuple[int, ...], ...],
        num_processes: int,
    ) -> None:
        self._on_step = on_step
        self._targets = targets
        self._num_processes = num_processes
        self._done = 0
        self._total = _STEPS_BEFORE_TARGETS + _STEPS_PER_TARGET * len(targets)

    def say(self, text: str) -> None:
        if self._on_step is not None:
            self._on_step(text, self._done, self._total)
        self._done += 1

    def hear(self, process_index: int, value: dict[str, Any]) -> None:
        if process_index != 0 or value["event"] not in ("restore", "compare"):
            return
        label = "-".join(map(str, self._targets[value["target"]]))
        if value["event"] == "restore":
            self.say(f"Restoring onto {label}, {value['way']}")
        else:
            self.say(f"Comparing every bit on {label}")


def _gather(
    results: tuple[launch.ProcessResult, ...],
    target_index: int,
    sizes: tuple[int, ...],
    stored_bytes: int,
) -> TargetResult:
    """Makes one record of what all processes said about one target."""

    def said(event: str, **wanted: Any) -> list[dict[str, Any]]:
        """One message per process: the one with these items."""
        items = {"event": event, "target": target_index, **wanted}.items()
        return [
            next(message for message in result.messages if items <= message.items())
            for result in results
        ]

    def measured(way: str) -> Measured:
        facts = said("restored", way=way)
        fetched = tuple(fact["fetched_bytes"] for fact in facts)
        return Measured(
            fetched_bytes_per_host=fetched,
            amplification=sum(fetched) / stored_bytes,
            collectives=facts[0]["collectives"],
            seconds=max(fact["seconds"] for fact in facts),
            compile_seconds=max(fact["compile_seconds"] for fact in facts),
            reasons=facts[0]["reasons"],
        )

    compared = said("compared")
    return TargetResult(
        mesh=sizes,
        first=demo_worker.ways_in_order(target_index)[0],
        stock=measured("stock"),
        planned=measured("planned"),
        num_shards=sum(fact["num_shards"] for fact in compared),
        differences=tuple(
            difference for fact in compared for difference in fact["differences"]
        ),
    )

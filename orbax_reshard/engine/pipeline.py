"""Executes the planned groups of a restore: read, exchange, relabel, wave by wave.

    event loop     read wave 0 | read wave 1 | read wave 2 | ...
    compile lane   program A   | program B   |
    launch lane                | meet, run 0 | meet, run 1 | ...

The event loop reads ahead of the exchange as far as the blocks that wait stay within
a bound, so that storage never waits for a compilation. A host whose read fails goes on
to the next meeting and says so there; every host then raises the same error, and no
host is left waiting in a collective.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import tensorstore as ts

from orbax_reshard.engine import exchange
from orbax_reshard.engine.agreement import Failure, Hosts, first_failure, say
from orbax_reshard.engine.lane import Lane, swallow
from orbax_reshard.engine.read import (
    Block,
    ByteBudget,
    allocate,
    read_wave,
)
from orbax_reshard.engine.transport import Transport
from orbax_reshard.engine.work import Target, WaveError, Work
from orbax_reshard.errors import RestoreTimeoutError
from orbax_reshard.planning.boxes import Box
from orbax_reshard.planning.layout import Intermediate
from orbax_reshard.planning.plan import GroupPlan, RestorePlan, wave_bytes_per_host

# Blocks that are read but not yet on the devices, unless a read budget says less: some
# waves, so that storage never waits for a compilation or a slow exchange.
MAX_AHEAD_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Wave:
    """One wave on this host."""

    number: int
    index: int
    group: GroupPlan
    leaves: tuple[int, ...]
    layout: Intermediate


class Restore:
    """One execution of the planned groups on this host.

    Args:
        plan: the agreed plan.
        arrays: opened arrays, by leaf index.
        targets: what the caller gets, by leaf index.
        hosts: who takes part.
        budget: bytes in flight on this host.
        progress: told the decoded bytes that arrived, or None.
    """

    def __init__(
        self,
        plan: RestorePlan,
        arrays: Mapping[int, ts.TensorStore],
        targets: Mapping[int, Target],
        hosts: Hosts,
        budget: ByteBudget,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Stores the arguments; nothing starts yet."""
        self._plan = plan
        self._arrays = arrays
        self._targets = targets
        self._hosts = hosts
        self._budget = budget
        bound = budget.max_bytes
        self._ahead = ByteBudget(MAX_AHEAD_BYTES if bound is None else bound)
        self._progress = progress
        self._programs: dict[int, Future[exchange.Program]] = {}
        self._launch = Lane("orbax-reshard-launch")
        self._compile = Lane("orbax-reshard-compile")
        self.work = Work()

    async def run(self) -> dict[int, jax.Array]:
        """Restores all planned leaves that have devices on this host.

        Returns:
            The arrays by leaf index.

        Raises:
            WaveError: this or another host failed.
            RestoreTimeoutError: a host did not come, or an exchange did not end.
        """
        waves = self._waves()
        self._start_compiling(waves)
        ahead: asyncio.Queue[list[Block] | BaseException] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read_all(waves, ahead))
        results: dict[int, jax.Array] = {}
        failed: BaseException | None = None
        try:
            for wave in waves:
                blocks: list[Block] | None = None
                if failed is None:
                    item = await ahead.get()
                    if isinstance(item, BaseException):
                        failed = item
                    else:
                        blocks = item
                    del item
                made, failed = await self._finish_wave(wave, blocks, failed)
                await self._ahead.release(wave_bytes_per_host(wave.group))
                results.update(made)
                if failed is not None:
                    reader.cancel()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._launch.close()
            self._compile.close()
            for future in self._programs.values():
                swallow(future)
        if failed is not None:
            raise WaveError(self._failure(failed, "?"), failed) from failed
        return results

    def _waves(self) -> list[_Wave]:
        """The waves in which this host has devices, numbered alike on all hosts."""
        made: list[_Wave] = []
        number = 0
        for index, group in enumerate(self._plan.groups):
            if group.decision != "planned":
                continue
            assert group.digits is not None
            mine = self._hosts.here in group.digits.mesh.host_ids
            for leaves, layout in zip(
                group.waves, group.wave_intermediates, strict=True
            ):
                if mine:
                    made.append(_Wave(number, index, group, leaves, layout))
                number += 1
        return made

    def _start_compiling(self, waves: Sequence[_Wave]) -> None:
        """Queues the programs in the order of need, before the first byte is read."""
        for wave in waves:
            if not wave.group.needs_program or wave.index in self._programs:
                continue
            key = self._key(wave.group)
            devices = self._targets[wave.leaves[0]].devices

            def job(
                key: exchange.ExchangeKey = key,
                devices: tuple[exchange.Device, ...] = devices,
            ) -> exchange.Program:
                start = time.monotonic()
                program = exchange.PROGRAMS.get(key, devices)
                self.work.compile_seconds += time.monotonic() - start
                return program

            self._programs[wave.index] = self._compile.submit(job)

    def _key(self, group: GroupPlan) -> exchange.ExchangeKey:
        assert group.intermediate is not None and group.digits is not None
        target = self._targets[group.leaves[0]]
        return exchange.ExchangeKey(
            intermediate=group.intermediate,
            steps=group.steps,
            digits=group.digits,
            dtype=target.dtype,
            platform=target.devices[0].platform,
        )

    async def _read_all(
        self,
        waves: Sequence[_Wave],
        ahead: asyncio.Queue[list[Block] | BaseException],
    ) -> None:
        """Reads wave after wave; the first failure is handed on and ends it."""
        start = time.monotonic()
        for wave in waves:
            await self._ahead.acquire(wave_bytes_per_host(wave.group))
            try:
                blocks = await self._read(wave)
            except Exception as error:
                await ahead.put(
                    WaveError(self._failure(error, self._names(wave)), error)
                )
                return
            self.work.read_seconds = time.monotonic() - start
            await ahead.put(blocks)
            del blocks

    async def _read(self, wave: _Wave) -> list[Block]:
        target = self._targets[wave.leaves[0]]
        assert wave.group.shape is not None
        blocks = allocate(
            [b for d, b in self._local(wave) if d is not None],
            wave.layout.piece_width,
            target.dtype,
        )
        await read_wave(
            blocks,
            [self._arrays[leaf] for leaf in wave.leaves],
            leaves=wave.leaves,
            chunk_shape=wave.group.shape.chunk_shape[1:],
            budget=self._budget,
            counter=self.work.counter,
            on_bytes=self._progress,
        )
        return blocks

    def _local(self, wave: _Wave) -> list[tuple[exchange.Device, Box]]:
        """This host's devices, in mesh order, with the boxes that they read."""
        assert wave.group.digits is not None
        devices = self._targets[wave.leaves[0]].devices
        boxes = wave.layout.device_boxes(wave.group.digits)
        return [
            (device, box)
            for device, box in zip(devices, boxes, strict=True)
            if device.process_index == self._hosts.here
        ]

    async def _finish_wave(
        self,
        wave: _Wave,
        blocks: list[Block] | None,
        failed: BaseException | None,
    ) -> tuple[dict[int, jax.Array], BaseException | None]:
        """Places and exchanges one wave on the launch lane, or reports a failure."""
        if not wave.group.needs_program and blocks is None:
            return {}, failed
        job = self._launch.submit(
            functools.partial(self._launch_wave, wave, blocks, failed)
        )
        limit = 2 * self._hosts.timeout_seconds
        try:
            made = await asyncio.wait_for(asyncio.wrap_future(job), limit)
        except WaveError as error:
            return {}, error
        except TimeoutError as error:
            if isinstance(error, RestoreTimeoutError):
                raise
            swallow(job)
            raise RestoreTimeoutError(
                f"the exchange of {self._names(wave)} (wave {wave.number}) did not "
                f"end within {limit:g} s on host {self._hosts.here}; a host of "
                f"{list(self._hosts.hosts)} is stuck or gone",
                code="exchange_stuck",
            ) from error
        return made, None

    def _launch_wave(
        self, wave: _Wave, blocks: list[Block] | None, failed: BaseException | None
    ) -> dict[int, jax.Array]:
        """On the launch lane: place, meet, run, relabel."""
        start = time.monotonic()
        placed: list[jax.Array] | None = None
        program: exchange.Program | None = None
        if failed is None and blocks is not None:
            try:
                if wave.group.needs_program:
                    program = self._programs[wave.index].result(
                        self._hosts.timeout_seconds
                    )
                placed = self._place(wave, blocks, packed=program is not None)
                blocks.clear()  # the caller still holds the list, not the buffers
            except Exception as error:
                failed = WaveError(self._failure(error, self._names(wave)), error)
        if not wave.group.needs_program:
            if failed is not None or placed is None:
                assert failed is not None
                raise failed
            return self._label(wave, placed)
        assert wave.group.digits is not None
        words = self._hosts.meet(
            f"wave {wave.number}",
            say(None if failed is None else self._failure(failed, self._names(wave))),
            wave.group.digits.mesh.host_ids,
        )
        failure = first_failure(words)
        if failure is not None:
            if isinstance(failed, WaveError):
                raise failed
            raise WaveError(failure, None)
        assert program is not None and placed is not None
        try:
            made = self._exchange(wave, program, placed)
        except Exception as error:
            # Peers find out at their next meeting, to which this host still comes.
            raise WaveError(self._failure(error, self._names(wave)), error) from error
        self.work.exchange_seconds += time.monotonic() - start
        return made

    def _place(
        self, wave: _Wave, blocks: list[Block], *, packed: bool
    ) -> list[jax.Array]:
        """Blocks onto the devices; a block that devices share is copied to each."""
        target = self._targets[wave.leaves[0]]
        transport = Transport(target.dtype)
        by_box = {block.box: block.data for block in blocks}
        placed: list[jax.Array] = []
        # Canonicalising has happened on the host: 64-bit words must stay 64 bits.
        with jax.enable_x64(target.dtype.itemsize >= 8):
            for device, box in self._local(wave):
                data = by_box[box]
                if packed:
                    placed.append(jax.device_put(transport.pack(data), device))
                else:
                    placed += [jax.device_put(leaf, device) for leaf in data]
        return placed

    def _exchange(
        self, wave: _Wave, program: exchange.Program, placed: list[jax.Array]
    ) -> dict[int, jax.Array]:
        """Runs the program; returns when its results are there."""
        assert wave.group.intermediate is not None and wave.group.digits is not None
        target = self._targets[wave.leaves[0]]
        key = self._key(wave.group)
        stacked = jax.make_array_from_single_device_arrays(
            exchange.stacked_shape(
                wave.group.intermediate, wave.group.digits, Transport(target.dtype)
            ),
            program.argument,
            placed,
        )
        placed.clear()
        made = jax.block_until_ready(program.run(stacked))
        stacked.delete()
        self.work.programs.add(key)
        self.work.collectives.update(dict(program.collectives))
        return {
            leaf: exchange.relabel(array, self._targets[leaf].sharding, target.shape)
            for leaf, array in zip(wave.leaves, made, strict=False)
        }

    def _label(self, wave: _Wave, placed: list[jax.Array]) -> dict[int, jax.Array]:
        """Blocks that already are target shards, as arrays; no program is needed."""
        width = wave.layout.piece_width[0]
        return {
            leaf: jax.make_array_from_single_device_arrays(
                self._targets[leaf].shape,
                self._targets[leaf].sharding,
                placed[slot::width],
            )
            for slot, leaf in enumerate(wave.leaves)
        }

    def _names(self, wave: _Wave) -> str:
        """The leaves of a wave, for messages."""
        names = [repr(self._plan.leaves[leaf].name) for leaf in wave.leaves]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def _failure(self, error: BaseException, leaves: str) -> Failure:
        if isinstance(error, WaveError):
            return error.failure
        return Failure(
            host=self._hosts.here,
            leaf=leaves,
            text=str(error),
            kind=type(error).__name__,
        )

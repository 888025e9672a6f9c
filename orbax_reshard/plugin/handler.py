"""``ReshardingArrayHandler``: Orbax's array handler, with planned restores.

Saving, metadata and everything that a plan cannot improve are Orbax's own code. A
restore goes through these phases, and every host takes part in each meeting even
when it has failed:

    resolve targets, open all arrays, plan        (errors are kept, not raised)
    meeting "agree": same leaves, same plan, nobody failed
    read and exchange the planned groups          (a meeting per wave)
    read the direct leaves through stock
    meeting "done": figures of all hosts, or the failure of one
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from orbax_reshard.engine import metadata as stores
from orbax_reshard.engine.agreement import Failure, Hosts, agree, first_failure, say
from orbax_reshard.engine.exchange import PROGRAMS
from orbax_reshard.engine.meshes import device_mesh
from orbax_reshard.engine.pipeline import Restore
from orbax_reshard.engine.read import ByteBudget
from orbax_reshard.engine.report import RestoreReport
from orbax_reshard.engine.work import WaveError, Work
from orbax_reshard.planning.options import Options
from orbax_reshard.planning.plan import RestorePlan
from orbax_reshard.planning.record import Record
from orbax_reshard.plugin import compat, targets
from orbax_reshard.plugin.prepare import Prepared, leaf_digest, prepare, read_budget
from orbax_reshard.plugin.results import all_sizes, build_report, host_word

_LOG = logging.getLogger("orbax_reshard")


class ReshardingArrayHandler(compat.ArrayHandler):
    """A drop-in for ``ocp.type_handlers.ArrayHandler`` that plans restores.

    Args:
        options: how to restore; ``Options()`` by default.
        **array_handler_kwargs: handed to ``ArrayHandler`` as they are.

    Attributes:
        options: the options in use.
        last_report: what the latest restore through this handler did, or None.
        last_plan: its plan, or None.

    Example::

        handler = ReshardingArrayHandler(Options(policy="read_once"))
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, handler), (int, ocp.type_handlers.ScalarHandler()))
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    """

    def __init__(
        self, options: Options | None = None, **array_handler_kwargs: Any
    ) -> None:
        """Builds the stock handler underneath."""
        super().__init__(**array_handler_kwargs)
        self.options = Options() if options is None else options
        self.last_report: RestoreReport | None = None
        self.last_plan: RestorePlan | None = None

    @classmethod
    def like(cls, handler: Any, options: Options | None) -> ReshardingArrayHandler:
        """A handler with all settings of an existing ``ArrayHandler``."""
        made = cls(options)
        known = vars(made).keys()
        for name, value in vars(handler).items():
            if name in known:
                setattr(made, name, value)
        made.options = Options() if options is None else options
        return made

    async def deserialize(
        self,
        infos: Sequence[compat.ParamInfo],
        args: Sequence[compat.RestoreArgs] | None = None,
    ) -> Sequence[jax.Array]:
        """Restores the leaves; see ``ArrayHandler.deserialize`` for arguments.

        Raises:
            TargetError: a target cannot hold its array; before anything is read.
            PlanMismatchError: hosts asked for different restores.
            RestoreReadError: a host could not read; the same on every host.
            RestoreTimeoutError: a host did not come.
        """
        if args is None or not infos or len(infos) != len(args):
            return await super().deserialize(infos, args)
        start = time.monotonic()
        if self.options.policy == "direct" or self.has_dispatcher():
            return await self._stock_only(infos, args, start)
        compiled_before = PROGRAMS.num_compiled
        shardings, failed = await self._resolve(infos, args)
        hosts = self._meeting(shardings)
        prepared: Prepared | None = None
        if failed is None:
            try:
                prepared = await prepare(
                    infos,
                    args,
                    shardings,
                    options=self.options,
                    metadata_key=self._metadata_key,
                )
            except Exception as error:
                failed = error
        if hosts is not None:
            await self._agree(hosts, prepared, failed, str(infos[0].parent_dir))
        if failed is not None:
            raise failed
        assert prepared is not None
        self.last_plan = prepared.plan
        bound, bound_source = read_budget(self.options, infos)
        budget = ByteBudget(bound)
        before = stores.fetched_bytes()
        here = None if hosts is None else hosts.here
        sizes = asyncio.create_task(asyncio.to_thread(_sizes, prepared, here))
        work, results, failed = await self._run(prepared, hosts, budget)
        planned_bytes = stores.fetched_bytes() - before
        if failed is None:
            try:
                direct = [i for i in range(len(infos)) if i not in results]
                await self._read_direct(direct, infos, args, results, prepared)
                results = await self._wrap(infos, results, direct)
            except Exception as error:
                failed = error
        direct_bytes = stores.fetched_bytes() - before - planned_bytes
        word = host_word(work, planned_bytes, direct_bytes, await sizes)
        words = await self._done(hosts, prepared, word, failed)
        self.last_plan = prepared.sized_plan(all_sizes(words))
        self.last_report = build_report(
            plan=self.last_plan,
            words=words,
            work=work,
            metadata_bytes=prepared.metadata_bytes,
            seconds=time.monotonic() - start,
            plan_seconds=prepared.plan_seconds,
            num_compiled=PROGRAMS.num_compiled - compiled_before,
            budget=budget,
            budget_source=bound_source,
        )
        _LOG.info("%s", self.last_report.summary())
        return [results[i] for i in range(len(infos))]

    async def _resolve(
        self,
        infos: Sequence[compat.ParamInfo],
        args: Sequence[compat.RestoreArgs],
    ) -> tuple[Sequence[Any], Exception | None]:
        """The targets; when that fails here, what tells which hosts take part."""
        try:
            return await compat.resolve_shardings(infos, args), None
        except Exception as error:
            return compat.given_shardings(args), error

    def _meeting(self, shardings: Sequence[Any]) -> Hosts | None:
        """The hosts that take part, or None when this process has no part."""
        here = jax.process_index()
        members: set[int] = set()
        for target in shardings:
            sharding, declined = targets.plain_sharding(target)
            if declined is None:
                members.update(device_mesh(sharding.mesh).host_ids)
        if here not in members:
            return None
        alone = members == {here}
        return Hosts(
            sorted(members),
            here,
            None if alone else compat.JaxCoordinator(),
            self.options.timeout_seconds,
        )

    async def _agree(
        self,
        hosts: Hosts,
        prepared: Prepared | None,
        failed: Exception | None,
        folder: str,
    ) -> None:
        """Meets before anything is read; raises alike on every host."""
        failure = None
        plan_digest = ""
        if failed is not None:
            failure = Failure(
                host=hosts.here,
                leaf="(before reading)",
                text=str(failed),
                kind=type(failed).__name__,
            )
        elif prepared is not None and not hosts.alone:
            plan_digest = prepared.plan.digest()

        def digests() -> dict[str, str]:
            requests = () if prepared is None else prepared.requests
            return {r.stored.name: leaf_digest(r) for r in requests}

        found = await asyncio.to_thread(
            agree, hosts, digests, plan_digest, failure, folder=folder
        )
        if found is not None and failed is None:
            raise found.error()

    async def _run(
        self, prepared: Prepared, hosts: Hosts | None, budget: ByteBudget
    ) -> tuple[Work, dict[int, jax.Array], Exception | None]:
        """Restores the planned groups; a failure is returned, not raised."""
        if hosts is None or not prepared.plan.planned:
            return Work(), {}, None
        progress = self.options.progress
        done = 0
        total = _bytes_of_host(prepared.plan, hosts.here)

        def tell(count: int) -> None:
            nonlocal done
            done += count
            assert progress is not None
            progress(done, total)

        restore = Restore(
            prepared.plan,
            prepared.arrays,
            prepared.targets,
            hosts,
            budget,
            tell if progress is not None else None,
        )
        try:
            return restore.work, await restore.run(), None
        except WaveError as error:
            return restore.work, {}, error

    async def _read_direct(
        self,
        direct: Sequence[int],
        infos: Sequence[compat.ParamInfo],
        args: Sequence[compat.RestoreArgs],
        results: dict[int, jax.Array],
        prepared: Prepared,
    ) -> None:
        """Hands the direct leaves to the stock path, in one call.

        The opened arrays stay referenced meanwhile, so that TensorStore serves
        stock's opens from the metadata that is already in memory.
        """
        if not direct:
            return
        read = await super().deserialize(
            [infos[i] for i in direct], [args[i] for i in direct]
        )
        results.update(zip(direct, read, strict=True))
        del prepared

    async def _wrap(
        self,
        infos: Sequence[compat.ParamInfo],
        results: dict[int, jax.Array],
        direct: Sequence[int],
    ) -> dict[int, jax.Array]:
        """Typed keys of the planned leaves; stock has wrapped those it read."""
        planned = [i for i in results if i not in set(direct)]
        wrapped = await compat.wrap_keys(
            self._array_metadata_store,
            [infos[i] for i in planned],
            [results[i] for i in planned],
        )
        return results | dict(zip(planned, wrapped, strict=True))

    async def _done(
        self,
        hosts: Hosts | None,
        prepared: Prepared,
        said: Mapping[str, object],
        failed: Exception | None,
    ) -> dict[int, Any]:
        """The last meeting: figures of all hosts, or one error for all."""
        failure = None
        if isinstance(failed, WaveError):
            failure = failed.failure
        elif failed is not None:
            names = [p.name for p in prepared.plan.leaves if p.decision == "direct"]
            cause = failed.__cause__ or failed  # stock wraps what storage said
            failure = Failure(
                host=jax.process_index(),
                leaf=", ".join(map(repr, names[:3])),
                text=str(cause),
                kind=type(cause).__name__,
            )
        word = say(failure, said)
        here = jax.process_index()
        words = {here: word}
        if hosts is not None:
            words = await asyncio.to_thread(hosts.meet, "done", word)
        found = failure or first_failure(words)
        if isinstance(failed, WaveError):
            raise failed.failure.error() from failed.cause
        if failed is not None and (hosts is None or hosts.alone):
            raise failed
        if found is not None:
            raise found.error() from failed
        return {host: json.loads(text) for host, text in words.items()}

    async def _stock_only(
        self,
        infos: Sequence[compat.ParamInfo],
        args: Sequence[compat.RestoreArgs],
        start: float,
    ) -> Sequence[jax.Array]:
        """Stock, whole: no meeting; the report covers this host only."""
        prepared = None if self.has_dispatcher() else await self._described(infos, args)
        before = stores.fetched_bytes()
        arrays = await super().deserialize(infos, args)
        fetched = stores.fetched_bytes() - before
        seconds = time.monotonic() - start
        here = jax.process_index()
        if prepared is None:
            reason = "dispatcher" if self.has_dispatcher() else "policy_direct"
            self.last_plan = None
            self.last_report = RestoreReport.of_stock(
                names=[info.name for info in infos],
                reason=reason,
                host=here,
                fetched_bytes=fetched,
                seconds=seconds,
            )
            return arrays
        self.last_plan = prepared.plan
        work = Work()
        self.last_report = build_report(
            plan=prepared.plan,
            words={here: host_word(work, 0, fetched, {})},
            work=work,
            metadata_bytes=prepared.metadata_bytes,
            seconds=seconds,
            plan_seconds=prepared.plan_seconds,
            num_compiled=0,
            budget=ByteBudget(compat.byte_limit(infos[0])),
            budget_source="stock",
        )
        return arrays

    async def _described(
        self,
        infos: Sequence[compat.ParamInfo],
        args: Sequence[compat.RestoreArgs],
    ) -> Prepared | None:
        """What the report of a stock restore compares with; never in its way."""
        try:
            return await prepare(
                infos,
                args,
                await compat.resolve_shardings(infos, args),
                options=self.options,
                metadata_key=self._metadata_key,
            )
        except Exception as error:
            _LOG.debug("no plan to compare a stock restore with: %s", error)
            return None


def _sizes(prepared: Prepared, host: int | None) -> dict[int, tuple[int, ...]]:
    """This host's share of the stored chunk sizes; what fails is left out."""
    try:
        return prepared.sizes(host)
    except Exception as error:
        _LOG.debug("stored chunk sizes are not known: %s", error)
        return {}


def _bytes_of_host(plan: RestorePlan, host: int) -> int:
    """Decoded bytes that a host reads for the planned groups."""
    total = 0
    for group in plan.planned:
        record: Record | None = group.forecast
        assert record is not None and group.shape is not None
        chunks = dict(zip(record.hosts, record.chunk_reads_per_host, strict=True))
        total += chunks.get(host, 0) * group.shape.chunk_bytes
    return total

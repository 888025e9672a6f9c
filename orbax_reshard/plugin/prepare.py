"""A restore up to its plan, on one host: open, describe, plan; nothing is read."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbax_reshard.engine import metadata as stores
from orbax_reshard.engine.work import Target
from orbax_reshard.planning.options import Options
from orbax_reshard.planning.plan import LeafRequest, RestorePlan
from orbax_reshard.planning.planner import build_plan
from orbax_reshard.planning.profile import HardwareProfile, default_profile
from orbax_reshard.plugin import compat, targets

# Restores of one model onto a few targets repeat in a process; a plan is small.
_cached_plan = functools.lru_cache(maxsize=16)(build_plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A restore up to its plan, on this host.

    Attributes:
        plan: what every host has to agree on.
        make_plan: makes it again from other requests, with the same options.
        arrays: opened arrays by leaf index.
        targets: what to build, by leaf index, for leaves that can be planned.
        requests: what was asked, in order.
        plan_seconds: spent planning.
        metadata_bytes: fetched while opening.
    """

    plan: RestorePlan
    make_plan: Callable[[tuple[LeafRequest, ...]], RestorePlan]
    arrays: Mapping[int, Any]
    targets: Mapping[int, Target]
    requests: tuple[LeafRequest, ...]
    plan_seconds: float
    metadata_bytes: int

    def sizes(self, host: int | None = None) -> dict[int, tuple[int, ...]]:
        """Stored chunk sizes by leaf index. Blocks.

        None are asked for a restore that ``auto`` made direct as a whole: it shall
        cost what stock costs.

        Args:
            host: ask only for this host's share of the leaves; None asks for all.
        """
        total = sum(r.stored.num_chunks for r in self.requests)
        declined = self.plan.policy == "auto" and not self.plan.planned
        if declined or total > stores.MAX_SIZED_CHUNKS:
            return {}
        hosts = self.plan.hosts
        mine = {
            index: request.stored
            for index, request in enumerate(self.requests)
            if host not in hosts or hosts[index % len(hosts)] == host
        }
        return stores.sizes_of(mine, self.arrays)

    def sized_plan(self, sizes: Mapping[int, tuple[int, ...]]) -> RestorePlan:
        """The same plan with forecasts in stored bytes; decisions stay as they are."""
        if not sizes:
            return self.plan
        return self.make_plan(
            tuple(
                replace(r, stored=replace(r.stored, encoded_bytes=sizes.get(index)))
                for index, r in enumerate(self.requests)
            )
        )


async def prepare(
    infos: Sequence[compat.ParamInfo],
    args: Sequence[compat.RestoreArgs],
    shardings: Sequence[Any],
    *,
    options: Options,
    metadata_key: str | None,
) -> Prepared:
    """Opens all arrays and plans; reads no array data, talks to no host.

    Args:
        infos: what Orbax knows of each leaf.
        args: what the caller asked of each leaf.
        shardings: the resolved targets.
        options: how to restore.
        metadata_key: the handler's name for TensorStore's metadata files.

    Raises:
        CheckpointError: a leaf is not in the checkpoint.
        TargetError: a target cannot hold its array.
    """
    before = stores.fetched_bytes()
    use_ocdbt = await compat.check_files(infos, metadata_key)
    to_open: list[stores.OpenRequest] = []
    for info, arg in zip(infos, args, strict=True):
        spec, joins = compat.read_spec(
            info, arg, use_ocdbt=use_ocdbt, metadata_key=metadata_key
        )
        to_open.append(
            stores.OpenRequest(
                name=info.name,
                spec=spec,
                context=info.ts_context,
                stock_reads_gaps=joins,
            )
        )
    opened = await stores.open_arrays(to_open)
    described = [
        stores.describe(request, array)
        for request, array in zip(to_open, opened, strict=True)
    ]
    requests: list[LeafRequest] = []
    wanted: dict[int, Target] = {}
    for index, (stored, array, arg, sharding) in enumerate(
        zip(described, opened, args, shardings, strict=True)
    ):
        shape, _, physical = compat.physical_target(arg, sharding)
        request, target = targets.leaf_request(
            stored,
            array,
            shape=shape,
            target=physical,
            strict=getattr(arg, "strict", True),
        )
        requests.append(request)
        if target is not None:
            wanted[index] = target
    start = time.monotonic()
    make_plan = functools.partial(
        _cached_plan,
        policy=options.policy,
        profile=_profile(options, infos, wanted),
        read_budget_bytes=read_budget(options, infos)[0],
        device_budget_bytes=options.device_budget_bytes,
    )
    return Prepared(
        plan=make_plan(tuple(requests)),
        make_plan=make_plan,
        arrays=dict(enumerate(opened)),
        targets=wanted,
        requests=tuple(requests),
        plan_seconds=time.monotonic() - start,
        metadata_bytes=stores.fetched_bytes() - before,
    )


def _profile(
    options: Options,
    infos: Sequence[compat.ParamInfo],
    wanted: Mapping[int, Target],
) -> HardwareProfile:
    """The given profile, or the default for backend and storage scheme."""
    if options.profile is not None:
        return options.profile
    scheme = str(infos[0].parent_dir).partition("://")
    platforms = [t.devices[0].platform for t in wanted.values()]
    return default_profile(
        platform=platforms[0] if platforms else "cpu",
        scheme=scheme[0] if scheme[1] else "file",
    )


def read_budget(
    options: Options, infos: Sequence[compat.ParamInfo]
) -> tuple[int | None, str]:
    """The bound on bytes in flight, and where it comes from."""
    if options.read_budget_bytes is not None:
        return options.read_budget_bytes, "Options.read_budget_bytes"
    bound = compat.byte_limit(infos[0])
    return bound, "none" if bound is None else "the checkpoint handler"


def leaf_digest(request: LeafRequest) -> str:
    """What was asked of one leaf, in a few letters."""
    plain = replace(request.stored, encoded_bytes=None)
    text = repr((plain, replace(request, stored=plain)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Options: the public knobs, validated once, at the public door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orbax_reshard.errors import OptionsError
from orbax_reshard.planning.plan import POLICIES, Policy
from orbax_reshard.planning.profile import HardwareProfile

# Long enough for the slowest read of one wave that is still worth waiting for, short
# enough that a stuck host does not hold a cluster for hours.
DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to restore.

    Args:
        policy: ``"auto"`` lets the cost model decide per signature, ``"read_once"``
            takes the plan with the least fetched bytes whatever the profile says,
            ``"direct"`` is stock.
        profile: rates of the machine; None takes the named default for the backend
            and the storage scheme.
        read_budget_bytes: bound on the bytes that a host has in flight between
            storage and its block buffers; None takes the bound of the checkpoint
            handler (``restore_concurrent_gb``), if it has one. An array larger than
            the bound is read in more pieces.
        device_budget_bytes: inclusive bound on a device's bytes during one wave of
            the exchange; plans over it are not candidates.
        timeout_seconds: for each single wait for other hosts.
        progress: called with (bytes read so far, bytes that this host will read), in
            the thread of the restore, for planned leaves.

    Raises:
        OptionsError: an unknown policy, or a bound that is not positive.

    >>> Options(policy="read_once").timeout_seconds
    600.0
    """

    policy: Policy = "auto"
    profile: HardwareProfile | None = None
    read_budget_bytes: int | None = None
    device_budget_bytes: int | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        """Refuses what has no meaning."""
        if self.policy not in POLICIES:
            raise OptionsError(
                f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}",
                code="unknown_policy",
            )
        for name in ("read_budget_bytes", "device_budget_bytes", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OptionsError(
                    f"{name} is {value}; it must be above 0", code="bad_bound"
                )

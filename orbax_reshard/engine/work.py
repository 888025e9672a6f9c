"""What a restore works towards, what it has done, and how it fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import jax
import numpy as np

from orbax_reshard.engine import exchange
from orbax_reshard.engine.agreement import Failure
from orbax_reshard.engine.read import ReadCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the caller gets for one leaf.

    Attributes:
        sharding: the caller's own object.
        devices: its devices in mesh order.
        dtype: dtype of the result.
        shape: shape of the result.
    """

    sharding: jax.sharding.Sharding
    devices: tuple[exchange.Device, ...]
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(slots=True)
class Work:
    """What this host really did; filled while it happens.

    Attributes:
        counter: chunks and pieces read.
        collectives: kinds and numbers launched, from the compiled programs.
        programs: distinct programs launched.
        read_seconds: from the first read to the last byte.
        exchange_seconds: in meetings and programs, on the launch lane.
        compile_seconds: spent compiling, on the compile lane.
    """

    counter: ReadCounter = field(default_factory=ReadCounter)
    collectives: Counter[str] = field(default_factory=Counter)
    programs: set[exchange.ExchangeKey] = field(default_factory=set)
    read_seconds: float = 0.0
    exchange_seconds: float = 0.0
    compile_seconds: float = 0.0


class WaveError(Exception):
    """A failure of this or another host, carried to where the restore ends."""

    def __init__(self, failure: Failure, cause: BaseException | None) -> None:
        """``cause`` is the local exception, None when another host failed."""
        super().__init__(failure.text)
        self.failure = failure
        self.cause = cause

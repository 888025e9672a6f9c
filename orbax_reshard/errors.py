"""The errors that ask the user to act; everything else is a decline with a reason.

Each class subclasses a builtin, so that code written for stock Orbax keeps catching
what it caught before, and carries a machine-readable ``code``. A message names the
leaf, the fact, both values and where each came from, and what to do next.
"""

from __future__ import annotations


class ReshardError(Exception):
    """Base of all errors raised by this package.

    Attributes:
        code: a stable, machine-readable reason such as ``"shape_mismatch"``.
    """

    def __init__(self, message: str, *, code: str) -> None:
        """Keeps the message as the only argument, and the code beside it."""
        super().__init__(message)
        self.code = code


class OptionsError(ReshardError, ValueError):
    """An option has a value that has no meaning; raised where it is given."""


class TargetError(ReshardError, ValueError):
    """The asked target cannot hold the stored array; found before any array is read."""


class CheckpointError(ReshardError, FileNotFoundError, ValueError):
    """The path is no checkpoint, or a leaf that was asked for is not in it.

    Stock raises ``FileNotFoundError`` for the first and ``ValueError`` for the second.
    """


class BudgetError(ReshardError, ValueError):
    """No plan stays within the memory bound that the caller set."""


class PlanMismatchError(ReshardError, ValueError):
    """The hosts did not ask for the same restore; raised alike on every host."""


class RestoreReadError(ReshardError, OSError):
    """A host could not read its part; raised alike on every host, with the cause."""


class RestoreTimeoutError(ReshardError, TimeoutError):
    """A host did not arrive in time; names who is missing and in which phase."""


class NoIntermediateShardingError(ReshardError, ValueError):
    """No intermediate sharding exists between the two given shardings."""


class NoIntermediateShardingNeededError(NoIntermediateShardingError):
    """Going directly is already as good as going through an intermediate."""

"""Restore Orbax checkpoints onto another topology: read once, exchange the rest."""

from orbax_reshard.engine.report import RestoreReport
from orbax_reshard.errors import (
    BudgetError,
    CheckpointError,
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    OptionsError,
    PlanMismatchError,
    ReshardError,
    RestoreReadError,
    RestoreTimeoutError,
    TargetError,
)
from orbax_reshard.live import find_intermediate_sharding, plan_reshard, reshard
from orbax_reshard.planning.options import Options
from orbax_reshard.planning.plan import LeafPlan, RestorePlan
from orbax_reshard.planning.profile import HardwareProfile
from orbax_reshard.planning.reshard_plan import ReshardPlan
from orbax_reshard.plugin.handler import ReshardingArrayHandler
from orbax_reshard.plugin.registration import Registration, plan_restore, register

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "HardwareProfile",
    "LeafPlan",
    "NoIntermediateShardingError",
    "NoIntermediateShardingNeededError",
    "Options",
    "OptionsError",
    "PlanMismatchError",
    "Registration",
    "ReshardError",
    "ReshardPlan",
    "ReshardingArrayHandler",
    "RestorePlan",
    "RestoreReadError",
    "RestoreReport",
    "RestoreTimeoutError",
    "TargetError",
    "find_intermediate_sharding",
    "plan_reshard",
    "plan_restore",
    "register",
    "reshard",
]

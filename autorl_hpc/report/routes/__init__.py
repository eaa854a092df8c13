"""The training route of a checkpoint (planned by code, executed by what was observed and logged), and its settings."""

from autorl_hpc.report.routes.executed import Executed, executed, has_effect
from autorl_hpc.report.routes.logged import trained_in_vain
from autorl_hpc.report.routes.planned import Planned, planned
from autorl_hpc.report.routes.settings import settings
from autorl_hpc.report.routes.stages import rows_observed, steps_observed
from autorl_hpc.report.routes.trainers import mode_kept

__all__ = [
    "Executed",
    "Planned",
    "executed",
    "has_effect",
    "mode_kept",
    "planned",
    "rows_observed",
    "settings",
    "steps_observed",
    "trained_in_vain",
]

"""The training route of a checkpoint (planned by code, executed by trainers), and its settings."""

from autorl_hpc.report.routes.executed import executed, has_effect, mode_kept, trained_in_vain
from autorl_hpc.report.routes.planned import Alternative, Executed, Planned, planned
from autorl_hpc.report.routes.settings import settings

__all__ = [
    "Alternative",
    "Executed",
    "Planned",
    "executed",
    "has_effect",
    "mode_kept",
    "planned",
    "settings",
    "trained_in_vain",
]

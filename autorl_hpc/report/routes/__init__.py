"""The training route of a checkpoint (planned by code, executed by trainers), and its settings."""

from autorl_hpc.report.routes.executed import executed, mode_kept, trained_in_vain
from autorl_hpc.report.routes.planned import planned
from autorl_hpc.report.routes.route import Alternative, Executed, Planned
from autorl_hpc.report.routes.settings import settings

__all__ = ["Alternative", "Executed", "Planned", "executed", "mode_kept", "planned", "settings", "trained_in_vain"]

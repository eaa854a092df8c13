"""By which route a checkpoint came about: planned by code, executed by trainers; and with which settings."""

from autorl_hpc.report.routes.executed import executed, mode_kept, trained_in_vain
from autorl_hpc.report.routes.plan import planned
from autorl_hpc.report.routes.settings import settings
from autorl_hpc.report.routes.told import Alternative, Commanded, CommandSeen, Executed, Planned

__all__ = [
    "Alternative",
    "Commanded",
    "Executed",
    "Planned",
    "Seen",
    "executed",
    "mode_kept",
    "planned",
    "settings",
    "trained_in_vain",
]

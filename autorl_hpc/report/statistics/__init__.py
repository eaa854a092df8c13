"""Statistics of a report: pure functions of lists of numbers; the same input gives the same output, in whatever order."""

from autorl_hpc.report.statistics.best_of import BestOf as BestOf
from autorl_hpc.report.statistics.best_of import best_of_curve as best_of_curve
from autorl_hpc.report.statistics.best_of import expected_best_of as expected_best_of
from autorl_hpc.report.statistics.comparing import holm as holm
from autorl_hpc.report.statistics.comparing import least_permutation_p as least_permutation_p
from autorl_hpc.report.statistics.comparing import permutation_p as permutation_p
from autorl_hpc.report.statistics.comparing import probability_of_improvement as probability_of_improvement
from autorl_hpc.report.statistics.over_runs import CellTest as CellTest
from autorl_hpc.report.statistics.over_runs import bootstrap_mean as bootstrap_mean
from autorl_hpc.report.statistics.over_runs import leaderboard as leaderboard
from autorl_hpc.report.statistics.over_tasks import OverTasks as OverTasks
from autorl_hpc.report.statistics.over_tasks import over_tasks as over_tasks
from autorl_hpc.report.statistics.over_tasks import tasks_met as tasks_met
from autorl_hpc.report.statistics.resampling import RESAMPLES as RESAMPLES
from autorl_hpc.report.statistics.resampling import SEED as SEED
from autorl_hpc.report.statistics.scaling import BandPoint as BandPoint
from autorl_hpc.report.statistics.scaling import Curve as Curve
from autorl_hpc.report.statistics.scaling import band as band

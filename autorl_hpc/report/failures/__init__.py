"""Why a run, or one of its submissions, did not help: the paper's taxonomy and ours, with the lines that say so."""

from autorl_hpc.report.failures.decide import failure_of
from autorl_hpc.report.failures.facts import Exit, Gain, IterationFacts, LogExcerpt, RunFacts

__all__ = ["Exit", "Gain", "IterationFacts", "LogExcerpt", "RunFacts", "failure_of"]

"""A task's further figures beside its score: rewards, win rates, precision and recall; of the base model and of the selected
checkpoint, on both splits. Comparisons and their noise are the score's; these are shown as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import Field

from autorl_hpc.files.view import RunView
from autorl_hpc.records.base import Strict
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.report.format import UNKNOWN

COLUMNS: Final = ("base_feedback", "feedback", "base_report", "report")
"""Fields of `Figures`, in the order of the tables."""


class Figures(Strict):
    """The metrics of up to four evaluations, as the ledger and the base models' records hold them; empty where there is none."""

    base_feedback: dict[str, float] = Field(default_factory=dict)
    feedback: dict[str, float] = Field(
        default_factory=dict, description="Of the selected checkpoint, else of the best."
    )
    base_report: dict[str, float] = Field(default_factory=dict)
    report: dict[str, float] = Field(default_factory=dict)

    def names(self) -> list[str]:
        """Names of all figures, sorted."""
        return sorted({name for column in COLUMNS for name in self.of(column)})

    def of(self, column: str) -> Mapping[str, float]:
        """The figures of one evaluation."""
        found: Mapping[str, float] = getattr(self, column)
        return found

    def rows(self) -> list[tuple[str, list[float | None]]]:
        """Each figure's name and its four numbers."""
        return [(name, [self.of(column).get(name) for column in COLUMNS]) for name in self.names()]


def figures_of(view: RunView, base_feedback: Baseline | None, base_report: Baseline | None) -> Figures:
    """Those of a run."""
    closed = view.closed
    chosen = (
        view.submissions.get(closed.selected) if closed is not None and closed.selected is not None else view.best()
    )
    score = view.score_of(chosen) if chosen is not None else None
    report = closed.report if closed is not None and closed.selected is not None else None
    return Figures(
        base_feedback=base_feedback.evaluation.metrics if base_feedback is not None else {},
        feedback=score.evaluation.metrics if score is not None else {},
        base_report=base_report.evaluation.metrics if base_report is not None else {},
        report=report.metrics if report is not None else {},
    )


def cells(figures: Figures, names: Iterable[str]) -> dict[str, float | None]:
    """Columns of summary.csv, `report.average_reward`: for every name that some run has, so that all rows are alike."""
    return {f"{column}.{name}": figures.of(column).get(name) for name in names for column in COLUMNS}


def shown(value: float | None) -> str:
    """Whole numbers as such, others with three decimals."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value == round(value) else f"{value:.3f}"

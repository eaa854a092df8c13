"""What a leaderboard says, as typed records: agents by tasks under one set of conditions, with the noise of each number.

Improvements and scores are points (0 to 100), intervals 95 %, times seconds of budget. Null means unknown, never zero.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autorl_hpc.records.base import Strict
from autorl_hpc.states import Protocol

Axis = Literal["time_s", "tokens", "submissions", "gpu_hours"]
"""What an improvement costs, as the horizontal of a scaling curve."""

IntervalKind = Literal["t over runs", "range of two runs", "no spread seen", "items of one run, not over runs", "none"]
"""`no spread seen`: three runs or more that are all equal, which tell nothing of the next one."""


class OverRuns(Strict):
    """A mean over runs and what its number of runs allows."""

    n: int
    mean: float | None
    low: float | None = None
    high: float | None = None
    interval: IntervalKind
    bootstrap_low: float | None = Field(None, description="Bootstrap over runs, from five runs on.")
    bootstrap_high: float | None = None


class Conditions(Strict):
    """What the tasks of one leaderboard share. A field that nothing measured is null, and stands apart from every value."""

    imported: str | None = Field(None, description="As in a group's key.")
    base_model: str
    base_model_content_hash: str
    budget_s: float
    limits: dict[str, float] = Field(default_factory=dict, description="Further limits of the budget, by name.")
    gpus: str | None = Field(None, description="As in `resources`.")
    gpu_model: str | None = None
    environment_hash: str | None = Field(None, description="Of the environment agents train in; null: the suite's own.")
    protocol: Protocol
    network: str
    sandbox: str
    engine_hash: str | None


class CurvePoint(Strict):
    """The mean over runs of the best so far, once so much was spent."""

    x: float
    mean: float
    low: float | None = None
    high: float | None = None
    n_reached: int = Field(description="Runs that spent so much; the others stand at where they ended.")


class Curve(Strict):
    """Improvement of the best feedback score so far on the base model's, against one cost."""

    axis: Axis
    n: int = Field(description="Runs in it.")
    unknown: int = Field(0, description="Counted runs whose cost nothing measured: they are not in it.")
    points: tuple[CurvePoint, ...] = ()


class Spent(Strict):
    """What runs cost. `n` of `of` runs have the figure; sums and means are over those."""

    n: int
    of: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    per_point: float | None = Field(
        None, description="Sum over the sum of improvements of the same runs; null: they gained nothing together."
    )


class Costs(Strict):
    """By kind."""

    tokens: Spent
    cost_usd: Spent
    gpu_hours: Spent


class BoardTask(Strict):
    """One column: a task with its recipe and splits."""

    task: str
    recipe_hash: str
    split_hashes: dict[str, str]
    base_score: float | None = Field(None, description="As in a group's key.")
    group: int = Field(description="Its place in the report's `groups`.")

    def pins(self) -> str:
        """What tells columns of one task apart, in short: recipe and splits; of imported runs the base model's score."""
        if self.base_score is not None:
            return f"base {self.base_score:.2f}"
        splits = [f"{split} {sha256[:8]}" for split, sha256 in sorted(self.split_hashes.items())]
        return " ".join([f"recipe {self.recipe_hash[:8]}", *splits])


class BoardCell(Strict):
    """One agent on one task."""

    improvement: OverRuns
    report: OverRuns
    lost: int = Field(0, description="Runs lost to the infrastructure.")
    not_counted: int = Field(0, description="Runs left out for another reason.")
    p_value: float | None = Field(
        None, description="Of no improvement, by the t test over runs; null below three runs."
    )
    p_holm: float | None = Field(None, description="Adjusted for all cells of the leaderboard that have a p value.")
    rank: int | None = Field(None, description="1 + the cells whose interval lies wholly above this one's.")
    last_rank: int | None = Field(None, description="The last rank that can't be told apart: ranks 1 to 3 share a tie.")
    unranked: str | None = Field(None, description="Why it has no rank.")
    agent_versions: tuple[str, ...] = Field(
        (), description="What its runs' programs said of themselves, where they differ; in the order of their names."
    )
    mark: Literal["best", "worst"] | None = Field(None, description="Among this agent's modes on this task.")
    mark_clear: bool = Field(False, description="Whether the best's and the worst's intervals are apart.")


class Overall(Strict):
    """One agent over all tasks of a leaderboard: the mean of the tasks' means; no interval where a task's runs are all equal."""

    mean: float
    low: float | None = None
    high: float | None = None
    tasks: int


class BoardRow(Strict):
    """One agent with its driver and mode."""

    label: str
    agent: str
    agent_hash: str
    driver: str
    mode: str
    cells: tuple[BoardCell | None, ...] = Field(description="One for each task of the leaderboard; null: no run.")
    overall: Overall | None = Field(
        None, description="Only of agents with three counted runs on every task that is not ambiguous."
    )
    runs: int
    counted: int = Field(description="Of `runs`; the fields from here on tell of these alone.")
    excluded: dict[str, int] = Field(default_factory=dict, description="The others, by why they are not counted.")
    planned: dict[str, int] = Field(default_factory=dict, description="Runs by the route that the code planned.")
    executed: dict[str, int] = Field(default_factory=dict, description="Runs by the route that was executed.")
    turned: int = Field(0, description="Runs whose executed route is known and not the planned one.")
    modes_kept: int = Field(0, description="Runs whose executed route is what the mode asked for.")
    modes_broken: int = 0
    failures: dict[str, int] = Field(default_factory=dict, description="Runs by why they did not help.")
    costs: Costs


class Board(Strict):
    """A leaderboard: everything in it was measured under the same conditions."""

    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = Field(
        (), description="Not in `overall`: several recipes or splits of one task, each a column of its own."
    )
    ranks: bool = Field(description="False: its sandbox level stops nothing, so nothing in it ranks.")
    tasks: tuple[BoardTask, ...]
    rows: tuple[BoardRow, ...]

    def column(self, place: int) -> str:
        """What a column is called: its task, with recipe and splits where the task has several columns."""
        task = self.tasks[place]
        return task.task if [one.task for one in self.tasks].count(task.task) == 1 else f"{task.task} {task.pins()}"

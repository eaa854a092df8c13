"""Records of a report (summary.json is their JSON): runs, groups, comparisons, leaderboards, further figures, published results.

Scores, differences, gaps and intervals are points (0 to 100), intervals 95 %, times seconds of budget. Null: unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from autorl_hpc.files import reading
from autorl_hpc.files.layout import share
from autorl_hpc.records.base import Record, Strict, parse_record
from autorl_hpc.records.entries import Contamination, Fingerprint, FingerprintFlag, SandboxUsed, dropping_none
from autorl_hpc.report.format import lean
from autorl_hpc.report.story_records import Story
from autorl_hpc.scoring.stats import beyond_noise
from autorl_hpc.states import EndedBy, Fault, Protocol, RunState, Split, SubmissionState

# --- leaderboards

Axis = Literal["time_s", "tokens", "submissions", "gpu_hours"]
"""The horizontal axis of a scaling curve: what an improvement costs."""

IntervalKind = Literal["t over runs", "range of two runs", "no spread seen", "items of one run, not over runs", "none"]
"""`no spread seen`: three or more runs with equal results, which say nothing about the next run."""


class OverRuns(Strict):
    """A mean over runs, with the interval that the number of runs allows."""

    n: int
    mean: float | None
    low: float | None = None
    high: float | None = None
    interval: IntervalKind


DriverSettings = dict[str, str]
"""What was requested of a driver, by name and in words; empty: no driver. Two drivers of one name with other settings are two."""

LATER: Final = "base_model_prompting_hash"
"""A field that older runs lack; left out where it is null, so that hashes and files of older reports stay what they were."""


class Conditions(Strict):
    """What all tasks of one leaderboard share. A field that was not measured is null, and null differs from every value."""

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return dropping_none(handler(self), LATER)

    imported: str | None = None  # whose results, and from which of several folders; null: our own
    base_model: str
    base_model_content_hash: str
    base_model_prompting_hash: str | None = None  # of its template, tokenizer and config; null: an older run
    budget_s: float
    limits: dict[str, float] = Field(default_factory=dict)  # further limits of the budget, by name
    gpus: str | None = None  # of the first attempt's job, by the ledger; `0`: there was none; null: unknown
    gpu_model: str | None = None
    environment_hash: str | None = None  # of the environment agents train in; null: the suite's own
    protocol: Protocol
    network: str
    sandbox: str
    engine_hash: str | None


class CurvePoint(Strict):
    """Mean over runs of the best score so far, at one cost."""

    x: float
    mean: float
    low: float | None = None
    high: float | None = None
    n_reached: int  # runs that spent so much; the others stand at where they ended


class Curve(Strict):
    """Improvement of the best feedback score so far over the base model, against one cost."""

    axis: Axis
    n: int  # runs in it
    unknown: int = 0  # counted runs whose cost nothing measured: they are not in it
    points: tuple[CurvePoint, ...] = ()


class Spent(Strict):
    """What runs cost. `n` of `of` runs have the figure; sums and means are over these `n`."""

    n: int
    of: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    per_point: float | None = None  # sum over the sum of improvements of the same runs; null: no gain


class Costs(Strict):
    """Costs by kind."""

    tokens: Spent
    cost_usd: Spent
    gpu_hours: Spent


class Rates(Strict):
    """How many counted runs succeeded, by the paper's three measures; docs/statistics.md defines them."""

    of: int = 0  # counted runs
    improved: int = 0  # with a submission above the base model on feedback
    cycles: int = 0  # with a scored submission that is no copy: a whole cycle of training, evaluation and submission
    coded: int = 0  # that wrote code which trains
    coded_of: int = 0  # runs of which that is known
    rollbacks: float | None = None  # mean number of submissions that go back to an earlier checkpoint; null: unknown


class LevelResult(Strict):
    """One agent on the tasks of one level: 1 static data, 2 a judge, 3 interaction."""

    level: Literal[1, 2, 3]
    tasks: int
    mean: float  # of the tasks' mean improvements
    rates: Rates  # of the runs on these tasks


class BoardTask(Strict):
    """One column of a leaderboard: a task with its recipe and splits."""

    task: str
    recipe_hash: str
    split_hashes: dict[str, str]
    base_score: float | None = None  # as in a group's key
    group: int  # its place in the report's `groups`

    def pins(self) -> str:
        """Return short hashes of recipe and splits, which tell a task's columns apart; for imported runs the base score."""
        if self.base_score is not None:
            return f"base {self.base_score:.2f}"
        splits = [f"{split} {sha256[:8]}" for split, sha256 in sorted(self.split_hashes.items())]
        return " ".join([f"recipe {self.recipe_hash[:8]}", *splits])


class BoardCell(Strict):
    """One agent on one task."""

    improvement: OverRuns
    report: OverRuns
    lost: int = 0  # runs lost to the infrastructure
    not_counted: int = 0  # runs left out for another reason
    p_value: float | None = None  # of no improvement, by the t test over runs; null below three runs
    p_holm: float | None = None  # adjusted for all cells of the leaderboard that have a p value
    rank: int | None = None  # 1 + the cells that are better by the group's comparisons (p by Holm below 0.05)
    last_rank: int | None = None  # the last rank that can't be told apart: ranks 1 to 3 share a tie
    unranked: str | None = None  # why it has no rank
    agent_versions: tuple[str, ...] = ()  # of its runs' programs, where they differ; sorted
    rates: Rates = Field(default_factory=Rates)


class Overall(Strict):
    """One agent over all tasks of a leaderboard: mean of the tasks' means; no interval if the runs of a task are all equal."""

    mean: float
    low: float | None = None
    high: float | None = None
    tasks: int


class BoardRow(Strict):
    """One agent with its driver and mode: a row of a leaderboard."""

    label: str
    agent: str
    agent_hash: str
    driver: str
    driver_settings: DriverSettings = Field(default_factory=dict)
    mode: str
    cells: tuple[BoardCell | None, ...]  # one for each task of the leaderboard; null: no run
    overall: Overall | None = None  # only of agents with three counted runs on every task that is not ambiguous
    rates: Rates = Field(default_factory=Rates)
    levels: tuple[LevelResult, ...] = ()  # by level of the tasks, those with counted runs
    runs: int
    counted: int  # of `runs`; the fields from here on tell of these alone
    excluded: dict[str, int] = Field(default_factory=dict)  # the others, by why they are not counted
    planned: dict[str, int] = Field(default_factory=dict)  # runs by the route that the code planned
    executed: dict[str, int] = Field(default_factory=dict)  # runs by the route that was executed
    turned: int = 0  # runs whose executed route is known and not the planned one
    modes_kept: int = 0  # runs whose executed route is what the mode asked for
    modes_broken: int = 0
    failures: dict[str, int] = Field(default_factory=dict)  # runs by why they did not help
    costs: Costs


class Board(Strict):
    """A leaderboard. Everything in it was measured under the same conditions."""

    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = ()  # not in `overall`: several recipes or splits of one task
    ranks: bool  # false: its sandbox level stops nothing, so nothing in it ranks
    tasks: tuple[BoardTask, ...]
    rows: tuple[BoardRow, ...]

    def column(self, place: int) -> str:
        """Return a column's name: its task, with recipe and splits if the task has several columns."""
        task = self.tasks[place]
        return task.task if [one.task for one in self.tasks].count(task.task) == 1 else f"{task.task} {task.pins()}"


# --- a task's further figures (rewards, win rates, precision, recall) of base model and selected checkpoint; no statistics

COLUMNS: Final = ("base_feedback", "feedback", "base_report", "report")  # of `Figures`, in the order of the tables


class Figures(Strict):
    """The metrics of up to four evaluations, as in the ledger and the base models' records; empty if there is none."""

    base_feedback: dict[str, float] = Field(default_factory=dict)
    feedback: dict[str, float] = Field(default_factory=dict)  # of the selected checkpoint, else of the best
    base_report: dict[str, float] = Field(default_factory=dict)
    report: dict[str, float] = Field(default_factory=dict)

    def of(self, column: str) -> Mapping[str, float]:
        """Return the figures of one evaluation."""
        found: Mapping[str, float] = getattr(self, column)
        return found

    def rows(self) -> list[tuple[str, list[float | None]]]:
        """Return each figure's name and its four values, by name, in the order of `COLUMNS`."""
        names = sorted({name for column in COLUMNS for name in self.of(column)})
        return [(name, [self.of(column).get(name) for column in COLUMNS]) for name in names]


# --- published results of Agent² RL-Bench (docs/paper-results.yaml): shown, never in a statistic

FILE = "paper-results.yaml"


PaperFigure = float | str | None  # null: not published


class PaperRow(Strict):
    """A row of a published table."""

    agent: str
    driver: str | None = None
    mode: str | None = None
    base_model: str | None = None
    cells: tuple[tuple[PaperFigure, ...] | None, ...]  # by column; null: nothing published


class PaperTable(Strict):
    """A published table, or a part of one, with one or several figures in a cell."""

    name: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]  # what the figures of each cell are, in order
    rows: tuple[PaperRow, ...]
    caveats: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> PaperTable:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{self.name}: {row.agent}: {len(row.cells)} cells for {len(self.columns)} columns")
            for column, cell in zip(self.columns, row.cells, strict=True):
                if cell is not None and len(cell) != len(self.figures):
                    what = f"{len(cell)} figures for the {len(self.figures)} that are named"
                    raise ValueError(f"{self.name}: {row.agent}, {column}: {what}")
        return self


class PaperResults(Record):
    """Published results and their source."""

    TITLE: ClassVar[str] = "paper results"

    title: str
    source: str
    read_in: str  # the text that the figures were read in
    protocol: Literal["paper"]
    budget: str
    tasks: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    tables: tuple[PaperTable, ...]


def read_paper() -> PaperResults:
    """Read the file of published results that ships with the package. Raises AutorlError: it is missing or wrong."""
    path = share("docs") / FILE
    return parse_record(PaperResults, reading.read_yaml(path), path)


# --- runs

Excluded = Literal["unfinished", "infrastructure", "cancelled", "damaged", "incomplete", "foreign_weights"]
"""Why a run's improvement is not in the statistics. Failing by the agent's fault is not a reason."""

UNTRIED = "untried"  # the sandbox of a run whose agent never started

OfClusters = Literal["bootstrap over clusters", "Wilson over clusters"]
"""Wilson, with clusters counted as items (as fewer if sizes are unequal), where resampling says nothing."""

ItemsInterval = Literal["Wilson", OfClusters, "t over items", "normal over items, length-controlled"]
"""Method of a score's interval."""

GainInterval = Literal["Tango", "bootstrap over clusters", "Tango over clusters", "bootstrap over items"]
"""Method of the interval of selected minus base."""


class ScoreSummary(Strict):
    """The score of one model on one split."""

    split: Split
    score: float | None  # points; null: it could not be scored, see fault
    low: float | None = None  # lower end of the interval
    high: float | None = None
    interval: ItemsInterval | None = None  # how it came about; null: there is none
    n: int = 0  # items
    clusters: int | None = None  # clusters that the items come in; null: they are independent
    truncated: int = 0  # answers cut off by the token limit
    submission_id: int | None = None  # null: the base model
    engine_hash: str | None = None
    fault: Fault | None = None
    reason: str | None = None


class BaselineSummary(ScoreSummary):
    """The base model's score on one split, measured twice."""

    key: str
    repeat_score: float | None = None
    noise: float | None = None  # difference of the two measurements: the grader's own noise
    repeat_changed_items: int = 0


class Gain(Strict):
    """Selected minus base on the report split."""

    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    won: int | None = None  # items that only the selected model solved
    lost: int | None = None  # items that only the base model solved
    n: int | None = None
    clusters: int | None = None  # clusters that the items come in; null: they are independent
    interval: GainInterval | None = None
    how: Literal[
        "paired_items",  # McNemar's mid-p test and Tango's interval
        "clustered_items",  # sign-flip test and bootstrap over clusters
        "graded_items",  # sign-flip test and BCa bootstrap
        "length_controlled_items",  # refits at a fixed penalty, permutation test and BCa bootstrap
        "base_kept",  # 0 by rule
        "scores_only",  # the items can't be used, so there is no interval
    ]

    @property
    def beyond_noise(self) -> int:
        """Return 1 if it is more than noise, -1 if it is less than 0 by more than noise, else 0."""
        return beyond_noise(self.difference, self.p_value, self.low, self.high)


class Gap(Strict):
    """The gap: (feedback selected - feedback base) - (report selected - report base)."""

    gap: float
    standard_error: float | None = None  # null: every item changed alike on both splits, or fewer than five clusters


class Noise(Strict):
    """Expected maximum of noise over the feedback queries: an upper bound on how much of the best score is luck."""

    queries: int  # distinct checkpoints that got a feedback score
    standard_error: float  # largest standard error of one feedback score, over clusters where items come in such
    expected_maximum: float
    is_upper_bound: Literal[True] = True


class Found(Strict):
    """Held-out items of one split whose text was in the workspace: the most that one look found."""

    split: Split
    items: int
    of: int  # items that were looked for
    submission_id: int | None  # when it was first so; null: at the end


class Point(Strict):
    """One submission in a run's trajectory."""

    submission_id: int
    manifest_id: str
    elapsed_s: float  # budget used when it was dropped
    status: SubmissionState
    score: float | None = None
    low: float | None = None
    high: float | None = None
    interval: ItemsInterval | None = None
    model_path: str | None = None
    note: str | None = None
    final: bool = False
    is_base: bool = False
    same_as: int | None = None
    fault: Fault | None = None
    reason: str | None = None
    fingerprint: Fingerprint | None = None  # null: not made yet, or nothing was scored
    contamination: Contamination | None = None  # null: nobody looked

    def short(self, selected: int | None) -> Point:
        """Drop looks that found nothing, and the fingerprint unless it is the selected checkpoint's."""
        keeps = self.contamination is not None and any(self.contamination.items.values())
        return lean(
            self,
            contamination=self.contamination if keeps else None,
            fingerprint=self.fingerprint if self.submission_id == selected else None,
        )


class RunSummary(Record):
    """The summary of one run."""

    TITLE: ClassVar[str] = "run summary"

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return dropping_none(handler(self), LATER)

    tool_version: str  # of the package that wrote it: the same one gives the same bytes
    run_id: str
    experiment: str
    imported: str | None = None  # whose results these are; null: our own. Imported ones are unproven.
    site: str | None = None  # the runs/ folder it comes from, in a report over several
    task: str
    level: Literal[1, 2, 3] | None = None  # of the task: static data, a judge, interaction; null: unknown
    agent: str
    agent_hash: str
    driver: str
    driver_settings: DriverSettings = Field(default_factory=dict)
    base_model: str
    base_model_content_hash: str
    base_model_prompting_hash: str | None = None  # of its template, tokenizer and config; null: an older run
    mode: str
    seed: int
    protocol: Protocol
    state: RunState
    damage: str | None = None  # what is wrong with the ledger
    budget_s: float
    limits: dict[str, float] = Field(default_factory=dict)  # further limits of the budget, by name
    environment_hash: str | None = None  # of the environment it trains in; null: the suite's own
    elapsed_s: float
    given_back_s: float = 0.0
    used: dict[str, float] = Field(default_factory=dict)  # of the budget's other parts, by name, as sealed
    starts: int = 0  # of the agent, in all attempts; 0: not recorded
    reprompts: int = 0  # of these, those that followed an end of its own with budget left
    attempts: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0  # accepted submissions that could not be scored
    waiting: int = 0  # accepted submissions whose score is due
    baseline_feedback: BaselineSummary | None = None
    best_feedback: ScoreSummary | None = None
    selected: int | None = None
    selected_by: str | None = None
    report: ScoreSummary | None = None
    baseline_report: BaselineSummary | None = None
    figures: Figures = Field(default_factory=Figures)  # the task's further figures, by evaluation and name
    improvement: Gain | None = None
    gap: Gap | None = None
    noise: Noise | None = None
    visible_gain_report: float | None = None  # smallest true gain that the report split can show
    visible_gain_feedback: float | None = None
    counted: bool  # whether its improvement enters the statistics over runs
    excluded: Excluded | None = None
    ranked: bool  # false: its task or sandbox level never ranks, its selected checkpoint's flags forbid it, or there are doubts
    doubts: tuple[str, ...] = ()  # why neither this run nor its agent's others on this task rank, in words
    marks: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # what no other run can have, by kind
    flags: tuple[FingerprintFlag, ...] = ()  # of the selected checkpoint's fingerprint
    looks: int = 0  # how often the workspace was looked through for held-out items
    contamination_end: Contamination | None = None  # the look at the workspace at the run's end
    contaminated: tuple[Found, ...] = ()  # held-out items found in the workspace; empty: none
    fault: Fault | None = None
    reason: str | None = None
    ended_by: EndedBy | None = None
    exit_code: int | None = None
    trajectory: tuple[Point, ...] = ()
    recipe_hash: str
    engine_hash: str | None = None
    split_hashes: dict[str, str]  # of its items; of the ids of those that were asked, where that was a part
    feedback_of: int | None = None  # items of the whole feedback split if only a part was asked; null: all were
    code_hash: str
    task_hash: str
    genesis: str  # hash of run.json, with which the chain begins
    ledger_head: str  # hash of the last entry read: compare it with the one that was printed
    ledger_entries: int
    gpus: str | None = None  # of the first attempt's job, as the ledger tells them; null: it doesn't
    gpu_model: str | None = None
    network: str  # the most open of its attempts; before the first, what was asked for
    sandbox: str  # the weakest level of its attempts; `untried` before the first
    sandboxes: tuple[SandboxUsed, ...] = ()  # of each attempt
    story: Story = Field(default_factory=Story)  # what the agent did, as far as it was recorded
    notes: tuple[str, ...] = ()
    is_short: bool = False  # true in a merged report: the run's own summary.json has more

    def short(self) -> RunSummary:
        """Return the run as in the merged report: all figures, without diffs, evidence, settings and what `Point.short` drops."""
        return self if self.is_short else self.packed()

    def packed(self) -> RunSummary:
        """Return the short run in little memory; also for one that is short already and was read from a file."""
        points = tuple(point.short(self.selected) for point in self.trajectory)
        return lean(self, story=self.story.short(), trajectory=points, is_short=True)


class Comparable(Conditions):
    """What must be equal for two scores to be comparable."""

    base_score: float | None = None  # of imported runs, the base model's score: all that tells how they were measured
    task: str
    recipe_hash: str
    split_hashes: dict[str, str]


class CellSummary(Strict):
    """The runs of one agent, driver and mode under equal conditions."""

    agent: str
    agent_hash: str
    driver: str
    driver_settings: DriverSettings = Field(default_factory=dict)
    mode: str
    counted: int
    excluded: dict[Excluded, int]
    base_kept: int  # counted runs whose improvement is 0 because nothing valid was submitted
    not_ranked: int = 0  # runs that are shown and do not rank, for want of a sandbox or by a flag
    counted_unranked: int = 0  # of the counted ones
    rates: Rates = Field(default_factory=Rates)
    doubted: int = 0  # runs that may not be what they say (`RunSummary.doubts`): no rank for the cell
    improvement: OverRuns
    report: OverRuns
    p_value: float | None = None  # mean improvement against 0: t test over runs, from three on
    best_of: tuple[float, ...] = ()  # expected improvement of the run that is best on feedback, of 1, 2, ... n runs
    best_of_intervals: tuple[tuple[float, float], ...] = ()  # of `best_of`; from five runs on
    scaling: tuple[Curve, ...] = ()  # improvement against time, tokens, submissions, GPU-hours
    run_ids: tuple[str, ...]
    places: tuple[int, ...]  # where these runs stand in the report's `runs`


class Comparison(Strict):
    """Two agents compared over runs, under equal conditions."""

    a: str
    b: str
    difference: float  # mean improvement of a less that of b
    p_value: float | None = None  # by `test`; null below three runs a side, or where a side's runs are all equal
    test: str | None = None  # Welch's t test, or a test against 0 where one of them kept the base model
    p_holm: float | None = None  # adjusted for the number of tests in this group: it decides ranks
    p_permutation: float | None = None  # permutation of runs, from five a side on
    probability_of_improvement: float


class Group(Strict):
    """Runs that may be compared with one another."""

    comparable: Comparable
    cells: tuple[CellSummary, ...]
    comparisons: tuple[Comparison, ...] = ()


class TasksCompared(Strict):
    """Two sides compared over the tasks on which both have two or more counted runs; all tasks weigh the same."""

    tasks: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # tasks on which one side has fewer than two counted runs
    difference: float  # mean over tasks of the mean improvement of a less that of b
    low: float | None = None  # Welch's t over tasks; null: too few runs
    high: float | None = None
    p_value: float | None = None  # by the same
    probability_of_improvement: float  # mann-Whitney, averaged over tasks


class TaskComparison(TasksCompared):
    """Two agents compared over tasks."""

    a: str
    b: str
    p_holm: float | None = None  # adjusted for the number of tests under these conditions


class AcrossTasks(Strict):
    """Comparisons of agents over several tasks, under conditions that differ in the task only."""

    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = ()  # left out: several recipes, splits or engines of one task
    comparisons: tuple[TaskComparison, ...]


class LeftOut(Strict):
    """Something that is not in the report, or not in its statistics, and why."""

    what: str
    why: str
    next_step: str | None = None


class MergedReport(Record):
    """Several runs in one report."""

    TITLE: ClassVar[str] = "merged report"

    tool_version: str
    experiments: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    groups: tuple[Group, ...]
    boards: tuple[Board, ...] = ()  # leaderboards: groups of several tasks under the same conditions
    paper: PaperResults | None = None  # published results, where asked for; in no statistic
    across_tasks: tuple[AcrossTasks, ...] = ()
    excluded: dict[Excluded, int]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()
    run_folders: tuple[str, ...] = Field((), exclude=True, description="Folders of `runs`, in this process only.")
    default_out: str = Field("report", exclude=True)

    def short(self) -> MergedReport:
        """Return the report with every run in short, as it is written."""
        return self.model_copy(update={"runs": tuple(run.short() for run in self.runs)})

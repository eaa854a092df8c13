"""Records of a report (summary.json is their JSON): runs, groups, comparisons, leaderboards, further figures, published results.

Scores, differences, gaps and intervals are points (0 to 100), intervals 95 %, times seconds of budget. Null: unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import share
from autorl_hpc.records.base import Record, Strict, parse_record
from autorl_hpc.records.entries import Contamination, Fingerprint, FingerprintFlag, SandboxUsed
from autorl_hpc.report.format import lean
from autorl_hpc.report.story_records import Story
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
    bootstrap_low: float | None = Field(None, description="Bootstrap over runs, from five runs on.")
    bootstrap_high: float | None = None


class Conditions(Strict):
    """What all tasks of one leaderboard share. A field that was not measured is null, and null differs from every value."""

    imported: str | None = Field(None, description="Whose results, and from which of several folders; null: our own.")
    base_model: str
    base_model_content_hash: str
    budget_s: float
    limits: dict[str, float] = Field(default_factory=dict, description="Further limits of the budget, by name.")
    gpus: str | None = Field(
        None,
        description="As `4`; `1, 4`: attempts had different numbers; `0`: there was none; null: nothing measured it.",
    )
    gpu_model: str | None = None
    environment_hash: str | None = Field(None, description="Of the environment agents train in; null: the suite's own.")
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
    n_reached: int = Field(description="Runs that spent so much; the others stand at where they ended.")


class Curve(Strict):
    """Improvement of the best feedback score so far over the base model, against one cost."""

    axis: Axis
    n: int = Field(description="Runs in it.")
    unknown: int = Field(0, description="Counted runs whose cost nothing measured: they are not in it.")
    points: tuple[CurvePoint, ...] = ()


class Spent(Strict):
    """What runs cost. `n` of `of` runs have the figure; sums and means are over these `n`."""

    n: int
    of: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    per_point: float | None = Field(
        None, description="Sum over the sum of improvements of the same runs; null: they gained nothing together."
    )


class Costs(Strict):
    """Costs by kind."""

    tokens: Spent
    cost_usd: Spent
    gpu_hours: Spent


class BoardTask(Strict):
    """One column of a leaderboard: a task with its recipe and splits."""

    task: str
    recipe_hash: str
    split_hashes: dict[str, str]
    base_score: float | None = Field(None, description="As in a group's key.")
    group: int = Field(description="Its place in the report's `groups`.")

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
    """A leaderboard. Everything in it was measured under the same conditions."""

    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = Field(
        (), description="Not in `overall`: several recipes or splits of one task, each a column of its own."
    )
    ranks: bool = Field(description="False: its sandbox level stops nothing, so nothing in it ranks.")
    tasks: tuple[BoardTask, ...]
    rows: tuple[BoardRow, ...]

    def column(self, place: int) -> str:
        """Return a column's name: its task, with recipe and splits if the task has several columns."""
        task = self.tasks[place]
        return task.task if [one.task for one in self.tasks].count(task.task) == 1 else f"{task.task} {task.pins()}"


# --- a task's further figures (rewards, win rates, precision, recall) of base model and selected checkpoint; no statistics

COLUMNS: Final = ("base_feedback", "feedback", "base_report", "report")
"""Fields of `Figures`, in the order of the tables."""


class Figures(Strict):
    """The metrics of up to four evaluations, as in the ledger and the base models' records; empty if there is none."""

    base_feedback: dict[str, float] = Field(default_factory=dict)
    feedback: dict[str, float] = Field(
        default_factory=dict, description="Of the selected checkpoint, else of the best."
    )
    base_report: dict[str, float] = Field(default_factory=dict)
    report: dict[str, float] = Field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of all figures, sorted."""
        return sorted({name for column in COLUMNS for name in self.of(column)})

    def of(self, column: str) -> Mapping[str, float]:
        """Return the figures of one evaluation."""
        found: Mapping[str, float] = getattr(self, column)
        return found

    def rows(self) -> list[tuple[str, list[float | None]]]:
        """Return each figure's name and its four values, in the order of `COLUMNS`."""
        return [(name, [self.of(column).get(name) for column in COLUMNS]) for name in self.names()]


# --- published results of Agent² RL-Bench (docs/paper-results.yaml): shown, never in a statistic

FILE = "paper-results.yaml"


class PaperRow(Strict):
    """A row of a published table."""

    agent: str
    driver: str | None = None
    mode: str | None = None
    scores: tuple[float | None, ...] = Field(description="Points, by task; null: not published.")


class PaperTable(Strict):
    """A published table, or a part of one."""

    name: str
    base_model: str
    base: tuple[float | None, ...] = Field(description="The base model's scores, by task.")
    rows: tuple[PaperRow, ...]


class PaperResults(Record):
    """Published results and their source."""

    TITLE: ClassVar[str] = "paper results"

    title: str
    source: str
    read_in: str = Field(description="The text that the figures were read in.")
    protocol: Literal["paper"]
    budget: str
    tasks: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    tables: tuple[PaperTable, ...]

    @model_validator(mode="after")
    def _one_score_a_task(self) -> PaperResults:
        for table in self.tables:
            for scores in (table.base, *(row.scores for row in table.rows)):
                if len(scores) != len(self.tasks):
                    raise ValueError(f"{table.name}: {len(scores)} scores for {len(self.tasks)} tasks")
        return self


def read_paper() -> PaperResults:
    """Read the file of published results that ships with the package.

    Raises:
        AutorlError: it is missing or wrong.
    """
    import yaml

    path = share("docs") / FILE
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise AutorlError(f"the published results can't be read: {error}", where=path) from error
    return parse_record(PaperResults, value, path)


Excluded = Literal["unfinished", "infrastructure", "cancelled", "damaged", "incomplete", "foreign_weights"]
"""Why a run's improvement is not in the statistics. Failing by the agent's fault is not a reason."""


UNTRIED = "untried"
"""The sandbox of a run whose agent never started."""


ItemsInterval = Literal[
    "Wilson",
    "bootstrap over clusters",
    "Wilson over clusters",
    "t over items",
    "normal over items, length-controlled",
]
"""Method of a score's interval. Wilson over clusters (clusters counted as items, as fewer if sizes are unequal and items known)
is used where resampling says nothing."""

GainInterval = Literal["Tango", "bootstrap over clusters", "Tango over clusters", "bootstrap over items"]
"""Method of the interval of selected minus base."""


class ScoreSummary(Strict):
    """The score of one model on one split."""

    split: Split
    score: float | None = Field(description="Points; null: it could not be scored, see fault.")
    low: float | None = Field(None, description="Lower end of the interval.")
    high: float | None = None
    interval: ItemsInterval | None = Field(None, description="How it came about; null: there is none.")
    n: int = Field(0, description="Items.")
    clusters: int | None = Field(None, description="Clusters that the items come in; null: they are independent.")
    truncated: int = Field(0, description="Answers cut off by the token limit.")
    submission_id: int | None = Field(None, description="Null: the base model.")
    engine_hash: str | None = None
    fault: Fault | None = None
    reason: str | None = None


class BaselineSummary(ScoreSummary):
    """The base model's score on one split, measured twice."""

    key: str
    repeat_score: float | None = None
    noise: float | None = Field(None, description="Difference of the two measurements: the grader's own noise.")
    repeat_changed_items: int = 0


class Gain(Strict):
    """Selected minus base on the report split."""

    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    won: int | None = Field(None, description="Items that only the selected model solved.")
    lost: int | None = Field(None, description="Items that only the base model solved.")
    n: int | None = None
    clusters: int | None = Field(None, description="Clusters that the items come in; null: they are independent.")
    interval: GainInterval | None = None
    how: Literal[
        "paired_items", "clustered_items", "graded_items", "length_controlled_items", "base_kept", "scores_only"
    ] = Field(
        description="paired_items: McNemar's mid-p test and Tango's interval. clustered_items: sign-flip test and "
        "bootstrap over clusters. graded_items: sign-flip test and BCa "
        "bootstrap. length_controlled_items: refits at a fixed penalty, permutation test and BCa bootstrap. base_kept: 0 by rule. scores_only: the items can't be used, so there is no interval."
    )


class Gap(Strict):
    """The gap: (feedback selected - feedback base) - (report selected - report base)."""

    gap: float
    standard_error: float | None = Field(
        None,
        description="Null where every item changed alike, on both splits: nothing varies, so no error can be told; and where the items "
        "of a split come in fewer than five clusters.",
    )


class Noise(Strict):
    """Expected maximum of noise over the feedback queries: an upper bound on how much of the best score is luck."""

    queries: int = Field(description="Distinct checkpoints that got a feedback score.")
    standard_error: float = Field(
        description="Largest standard error of one feedback score, over clusters where items come in such."
    )
    expected_maximum: float
    is_upper_bound: Literal[True] = True


class Found(Strict):
    """Held-out items of one split whose text was in the workspace: the most that one look found."""

    split: Split
    items: int
    of: int = Field(description="Items that were looked for.")
    submission_id: int | None = Field(description="When it was first so; null: at the end.")


class Point(Strict):
    """One submission in a run's trajectory."""

    submission_id: int
    manifest_id: str
    elapsed_s: float = Field(description="Budget used when it was dropped.")
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
    fingerprint: Fingerprint | None = Field(None, description="Null: not made yet, or nothing was scored.")
    contamination: Contamination | None = Field(None, description="Null: nobody looked.")

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

    tool_version: str = Field(description="Of the package that wrote it: the same one gives the same bytes.")
    run_id: str
    experiment: str
    imported: str | None = Field(
        None, description="Whose results these are; null: our own. Imported ones are unproven."
    )
    site: str | None = Field(None, description="Which of several runs/ folders it lies in, in a report over them.")
    task: str
    agent: str
    agent_hash: str
    driver: str
    base_model: str
    base_model_content_hash: str
    mode: str
    seed: int
    protocol: Protocol
    state: RunState
    damage: str | None = Field(None, description="What is wrong with the ledger.")
    budget_s: float
    limits: dict[str, float] = Field(default_factory=dict, description="Further limits of the budget, by name.")
    environment_hash: str | None = Field(None, description="Of the environment it trains in; null: the suite's own.")
    elapsed_s: float
    given_back_s: float = 0.0
    used: dict[str, float] = Field(
        default_factory=dict, description="Of the budget's other parts, by name, as the ledger's seal says."
    )
    starts: int = Field(0, description="Of the agent, in all attempts; 0: not recorded.")
    reprompts: int = Field(0, description="Of these, those that followed an end of its own with budget left.")
    attempts: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = Field(0, description="Accepted submissions that could not be scored.")
    waiting: int = Field(0, description="Accepted submissions whose score is due.")
    baseline_feedback: BaselineSummary | None = None
    best_feedback: ScoreSummary | None = None
    selected: int | None = None
    selected_by: str | None = None
    report: ScoreSummary | None = None
    baseline_report: BaselineSummary | None = None
    figures: Figures = Field(default_factory=Figures, description="The task's further figures, by evaluation and name.")
    improvement: Gain | None = None
    gap: Gap | None = None
    noise: Noise | None = None
    visible_gain_report: float | None = Field(None, description="Smallest true gain that the report split can show.")
    visible_gain_feedback: float | None = None
    counted: bool = Field(description="Whether its improvement enters the statistics over runs.")
    excluded: Excluded | None = None
    ranked: bool = Field(
        description="False: its sandbox level never ranks, or its selected checkpoint is an untrained copy or foreign weights."
    )
    flags: tuple[FingerprintFlag, ...] = Field((), description="Of the selected checkpoint's fingerprint.")
    looks: int = Field(0, description="How often the workspace was looked through for held-out items.")
    contamination_end: Contamination | None = Field(None, description="The look at the workspace at the run's end.")
    contaminated: tuple[Found, ...] = Field((), description="Held-out items found in the workspace; empty: none.")
    fault: Fault | None = None
    reason: str | None = None
    ended_by: EndedBy | None = None
    exit_code: int | None = None
    trajectory: tuple[Point, ...] = ()
    recipe_hash: str
    engine_hash: str | None = None
    split_hashes: dict[str, str] = Field(
        description="Of its items; of the ids of those that were asked, where that was a part."
    )
    feedback_of: int | None = Field(
        None, description="Items of the whole feedback split, where only a part of them was asked; null: all were."
    )
    code_hash: str
    task_hash: str
    genesis: str = Field(description="Hash of run.json, with which the chain begins.")
    ledger_head: str = Field(description="Hash of the last entry read: compare it with the one that was printed.")
    ledger_entries: int
    network: str = Field(description="The most open of its attempts; before the first, what was asked for.")
    sandbox: str = Field(description="The weakest level of its attempts; `untried` before the first.")
    sandboxes: tuple[SandboxUsed, ...] = Field((), description="Of each attempt.")
    story: Story = Field(default_factory=Story, description="What the agent did, as far as it was recorded.")
    notes: tuple[str, ...] = ()
    is_short: bool = Field(False, description="True in a merged report: the run's own summary.json has more.")

    def short(self) -> RunSummary:
        """Return the run as in the merged report: all figures, without diffs, evidence, settings and what `Point.short` drops."""
        return self if self.is_short else self.packed()

    def packed(self) -> RunSummary:
        """Return the short run in little memory; also for one that is short already and was read from a file."""
        points = tuple(point.short(self.selected) for point in self.trajectory)
        return lean(self, story=self.story.short(), trajectory=points, is_short=True)


class Comparable(Conditions):
    """What must be equal for two scores to be comparable."""

    base_score: float | None = Field(
        None, description="Of imported runs, the base model's score: all that tells how they were measured."
    )
    task: str
    recipe_hash: str
    split_hashes: dict[str, str]


class CellSummary(Strict):
    """The runs of one agent, driver and mode under equal conditions."""

    agent: str
    agent_hash: str
    driver: str
    mode: str
    counted: int
    excluded: dict[Excluded, int]
    base_kept: int = Field(description="Counted runs whose improvement is 0 because nothing valid was submitted.")
    not_ranked: int = Field(0, description="Runs that are shown and do not rank, for want of a sandbox or by a flag.")
    counted_unranked: int = Field(0, description="Of the counted ones.")
    improvement: OverRuns
    report: OverRuns
    p_value: float | None = Field(None, description="Mean improvement against 0: t test over runs, from three on.")
    p_sign_flip: float | None = Field(None, description="The same question without assuming a normal distribution.")
    p_sign_flip_least: float | None = Field(None, description="The least that so many runs can give: 0.25 for three.")
    best_of: tuple[float, ...] = Field((), description="Expected improvement of the best of 1, 2, ... n runs.")
    best_of_intervals: tuple[tuple[float, float], ...] = Field(
        (), description="Of the best of 1, 2, ... as far as so many runs tell; from five runs on."
    )
    scaling: tuple[Curve, ...] = Field((), description="Improvement against time, tokens, submissions, GPU-hours.")
    run_ids: tuple[str, ...]
    places: tuple[int, ...] = Field(description="Where these runs stand in the report's `runs`.")


class Comparison(Strict):
    """Two agents compared over runs, under equal conditions."""

    a: str
    b: str
    difference: float = Field(description="Mean improvement of a less that of b.")
    p_value: float = Field(description="Permutation of runs.")
    p_holm: float = Field(description="Adjusted for the number of comparisons in this group.")
    p_least: float = Field(description="The least p value that this number of runs can give.")
    probability_of_improvement: float


class Group(Strict):
    """Runs that may be compared with one another."""

    comparable: Comparable
    cells: tuple[CellSummary, ...]
    comparisons: tuple[Comparison, ...] = ()


class TasksCompared(Strict):
    """Two sides compared over the tasks on which both have two or more counted runs; all tasks weigh the same."""

    tasks: tuple[str, ...]
    left_out: tuple[str, ...] = Field((), description="Tasks on which one side has fewer than two counted runs.")
    difference: float = Field(description="Mean over tasks of the mean improvement of a less that of b.")
    low: float | None = Field(None, description="Stratified bootstrap over runs; null: too few runs.")
    high: float | None = None
    p_value: float = Field(description="Permutation of runs within each task.")
    p_least: float = Field(description="The least p value that this number of runs can give.")
    probability_of_improvement: float = Field(description="Mann-Whitney, averaged over tasks.")
    probability_low: float | None = None
    probability_high: float | None = None


class TaskComparison(TasksCompared):
    """Two agents compared over tasks."""

    a: str
    b: str
    p_holm: float = Field(description="Adjusted for the number of comparisons under these conditions.")


class AcrossTasks(Strict):
    """Comparisons of agents over several tasks, under conditions that differ in the task only."""

    conditions: Conditions
    ambiguous_tasks: tuple[str, ...] = Field(
        (), description="Left out: several recipes, splits or engines of one task."
    )
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
    boards: tuple[Board, ...] = Field(
        (), description="Leaderboards: groups of several tasks under the same conditions."
    )
    paper: PaperResults | None = Field(None, description="Published results, where asked for; in no statistic.")
    across_tasks: tuple[AcrossTasks, ...] = ()
    excluded: dict[Excluded, int]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()
    run_folders: tuple[str, ...] = Field((), exclude=True, description="Folders of `runs`, in this process only.")
    default_out: str = Field("report", exclude=True)

    def short(self) -> MergedReport:
        """Return the report with every run in short, as it is written."""
        return self.model_copy(update={"runs": tuple(run.short() for run in self.runs)})

"""Builds a runs tree as supervisor and grader leave it: records through their models, entries through the real Ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.files import atomic
from autorl_hpc.files.frozen_records import baseline_key
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.evaluate import ItemOutcome, items_bytes
from autorl_hpc.records import readable_json
from autorl_hpc.records.entries import (
    CLUSTERS,
    AttemptEnded,
    AttemptStarted,
    Closed,
    Evaluation,
    SandboxUsed,
    Score,
    Sealed,
    Submission,
)
from autorl_hpc.records.exchange import Baseline, Clock, Engine
from autorl_hpc.records.experiment import Budget, ExperimentSpec, GraderSpec, Matrix, SandboxSpec
from autorl_hpc.records.run import ExperimentRecord, RunRecord, Science
from autorl_hpc.records.task import Recipe, Sampling, SplitPin
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network, Protocol, SandboxLevel, Split

CREATED = "2026-01-01T00:00:00.000+00:00"
ENGINE = Engine(backend="tiny", versions={"tiny": "1"}, device="cpu", dtype="float32")
RECIPE = Recipe(
    name="plain", version=1, prompt="{question}", sampling=Sampling(max_new_tokens=8), scorer="tiny", scorer_version="1"
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def outcomes(n: int, solved: Sequence[int] | range) -> list[float]:
    inside = set(solved)
    return [1.0 if i in inside else 0.0 for i in range(n)]


def evaluation(
    split: Split,
    content: str,
    values: Sequence[float] | None,
    items: str | None = None,
    engine: Engine = ENGINE,
    **more: Any,
) -> Evaluation:
    """An evaluation as the grader makes it; `values` None is a failed one."""
    common: dict[str, Any] = {"split": split, "content_hash": content}
    common |= {"recipe_hash": RECIPE.hash(), "engine_hash": engine.digest(), **more}
    if values is None:
        return Evaluation(**common)
    n, correct = len(values), int(sum(values)) if all(v in (0.0, 1.0) for v in values) else None
    return Evaluation(**common, score=100.0 * sum(values) / n, n=n, correct=correct, items_sha256=items)


def save_items(path: Path, values: Sequence[float], clusters: Sequence[str] = ()) -> str:
    facts = [{"cluster": name} for name in clusters] or [{} for _ in values]
    rows = [
        ItemOutcome(id=f"q{i}", outcome=v, output_sha256=sha(f"{i}"), tokens=3, facts=facts[i])
        for i, v in enumerate(values)
    ]
    return write_items(path, rows)


def write_items(path: Path, rows: Sequence[ItemOutcome]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(items_bytes(rows))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class TreeRun:
    """One run being written."""

    tree: Tree
    dir: RunDir
    record: RunRecord
    _number: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.dir)

    @property
    def science(self) -> Science:
        return self.record.science

    @property
    def feedback_split(self) -> Split:
        return Split.REPORT if self.science.protocol is Protocol.PAPER else Split.FEEDBACK

    def start(self, elapsed_s: float = 0.0, **hardware: Any) -> TreeRun:
        attempt = RunView.of(self.ledger.read()).attempt + 1
        started = AttemptStarted(attempt=attempt, elapsed_s=elapsed_s, workspace="/scratch/w", **hardware)
        self.write(EntryKind.ATTEMPT_STARTED, started)
        network = Network.OPEN if self.tree.sandbox == SandboxLevel.NONE else self.tree.network
        used = SandboxUsed(attempt=attempt, level=SandboxLevel(self.tree.sandbox), network=network)
        if RunView.of(self.ledger.read()).sealed is None:
            self.write(EntryKind.SANDBOX, used)
        return self

    def interrupt(self, elapsed_s: float, reason: str = "signal 15") -> TreeRun:
        attempt = RunView.of(self.ledger.read()).attempt
        self.write(EntryKind.ATTEMPT_ENDED, AttemptEnded(attempt=attempt, elapsed_s=elapsed_s, reason=reason))
        return self

    def submit(self, at_s: float, values: Sequence[float] | None = None, **fields: Any) -> int:
        """An accepted submission; with `values`, its feedback score and items too. Returns its number."""
        self._number += 1
        number = self._number
        content = sha(f"{self.record.run_id}-{number}")
        if fields.get("is_base"):
            content = self.science.base_model_content_hash
        fields = {"content_hash": content, "manifest_id": f"m{number}", "model_path": f"output/v{number}", **fields}
        self.write(EntryKind.SUBMISSION, Submission(submission_id=number, status="accepted", elapsed_s=at_s, **fields))
        if values is not None:
            self.score(number, values)
        return number

    def score(self, number: int, values: Sequence[float] | None, engine: Engine = ENGINE, **more: Any) -> None:
        submission = RunView.of(self.ledger.read()).submissions[number]
        if submission.is_base:
            found = self.tree.baseline(self.science, self.feedback_split).evaluation
        else:
            assert submission.content_hash is not None
            path = self.dir.items / f"{number:06d}.{self.feedback_split}.jsonl.gz"
            clusters = self.tree.clusters.get(self.feedback_split, ())
            items = None if values is None else save_items(path, values, clusters)
            more = {**self.tree.metrics(self.feedback_split, values), **more}
            found = evaluation(self.feedback_split, submission.content_hash, values, items, engine, **more)
        self.write(EntryKind.SCORE, Score(submission_id=number, evaluation=found, grader="g", generation=1))

    def refuse(self, at_s: float, message: str = "no config.json", **fields: Any) -> int:
        self._number += 1
        usual = {
            "manifest_id": f"m{self._number}",
            "model_path": None,
            "fault": Fault.ARTIFACT,
            "code": "x",
            "advice": "y",
        }
        fields = {**usual, "submission_id": self._number, "status": "refused", "message": message, **fields}
        body = Submission(elapsed_s=at_s, **fields)
        self.write(EntryKind.SUBMISSION, body)
        return self._number

    def seal(
        self, elapsed_s: float = 600.0, ended_by: EndedBy = EndedBy.AGENT_EXIT, exit_code: int | None = 0, **fields: Any
    ) -> TreeRun:
        view = RunView.of(self.ledger.read())
        fields = {"given_back_s": 0.0, "refused": len(view.refused()), "elapsed_s": elapsed_s, **fields}
        counted = tuple(s.submission_id for s in view.accepted())
        self.write(EntryKind.SEALED, Sealed(submissions=counted, ended_by=ended_by, exit_code=exit_code, **fields))
        return self

    def close(self, values: Sequence[float] | None = None, engine: Engine = ENGINE, **fields: Any) -> TreeRun:
        """The closing entry: `values` are the report outcomes of the selected submission (final, else the best)."""
        view = RunView.of(self.ledger.read())
        chosen = view.final() or view.best()
        base = self.tree.baseline(self.science, Split.REPORT)
        closed: dict[str, Any] = {
            "selected": None,
            "selected_by": "base_kept",
            "report": base.evaluation,
            "grader": "g",
        }
        closed["baseline_report"] = base.key
        closed["baseline_feedback"] = self.tree.baseline(self.science, self.feedback_split).key
        if chosen is not None:
            closed.update(selected=chosen.submission_id, selected_by="final" if view.final() else "best_feedback")
            if self.science.protocol is Protocol.PAPER:
                score = view.score_of(chosen)
                assert score is not None
                closed["report"] = score.evaluation
            elif not chosen.is_base and values is not None:
                assert chosen.content_hash is not None
                path = self.dir.items / f"{chosen.submission_id:06d}.report.jsonl.gz"
                items = save_items(path, values, self.tree.clusters.get(Split.REPORT, ()))
                more = self.tree.metrics(Split.REPORT, values)
                closed["report"] = evaluation(Split.REPORT, chosen.content_hash, values, items, engine, **more)
        self.write(EntryKind.CLOSED, Closed(**{**closed, **fields}))
        self.ledger.seal_file()
        return self

    def clock(self, elapsed_s: float, given_back_s: float = 0.0) -> TreeRun:
        body = Clock(attempt=1, elapsed_s=elapsed_s, given_back_s=given_back_s, host="h", pid=1)
        atomic.write_bytes(self.dir.clock, body.canonical() + b"\n")
        return self

    def write(self, kind: EntryKind, body: Any) -> None:
        assert self.ledger.append(kind, body, role="supervisor") is not None


@dataclass
class Tree:
    """An experiment's folder with baselines and runs."""

    path: Path
    n_feedback: int = 40
    n_report: int = 100
    protocol: Protocol = Protocol.TWO_SPLIT
    sandbox: str = "landlock"
    network: Network = Network.NONE
    base_solved: dict[Split, Sequence[float]] = field(default_factory=dict)
    clusters: dict[Split, Sequence[str]] = field(default_factory=dict)
    runs: list[TreeRun] = field(default_factory=list)
    keeps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.experiment = ExperimentDir(self.path)
        for folder in self.experiment.folders():
            folder.mkdir(parents=True, exist_ok=True)
        self.base_solved.setdefault(Split.FEEDBACK, outcomes(self.n_feedback, range(self.n_feedback // 4)))
        self.base_solved.setdefault(Split.REPORT, outcomes(self.n_report, range(self.n_report // 4)))

    def science(self, **changes: Any) -> Science:
        counts = {Split.FEEDBACK: self.n_feedback, Split.REPORT: self.n_report}
        fields: dict[str, Any] = {"task": "arithmetic", "agent": "sft", "driver": "none", "base_model": "org/tiny"}
        fields |= {"mode": "free", "seed": 0, "budget": Budget(wall_clock_s=1200), "protocol": self.protocol}
        fields |= {"recipe": RECIPE, "base_model_content_hash": sha("base")}
        splits = {str(s): SplitPin(n=n, sha256=sha(f"{s}-{n}")) for s, n in counts.items()}
        return Science(**{**fields, "splits": splits, **changes})

    def metrics(self, split: Split, values: Sequence[float] | None) -> dict[str, Any]:
        names = self.clusters.get(split)
        return {"metrics": {CLUSTERS: float(len(set(names)))}} if names and values is not None else {}

    def baseline(self, science: Science, split: Split, engine: Engine = ENGINE) -> Baseline:
        """The base model's score on a split, measured now if need be: twice, with one item changed on feedback."""
        key = baseline_key(science, split, engine.digest())
        values = self.base_solved[split]
        path = self.experiment.baselines / f"{key}.items.jsonl.gz"
        measured = (self.experiment.baselines / f"{key}.json").exists() and path.exists()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if measured else ""
        items = digest or save_items(path, values, self.clusters.get(split, ()))
        found = evaluation(split, science.base_model_content_hash, values, items, engine, **self.metrics(split, values))
        changed = 1 if split is Split.FEEDBACK else 0
        again = {"repeat_score": 100.0 * (sum(values) + changed) / len(values), "repeat_changed_items": changed}
        which = {"key": key, "task": science.task, "base_model": science.base_model, "grader": "g"}
        record = Baseline(**which, evaluation=found, engine=engine, **again)
        atomic.publish_bytes(self.experiment.baselines / f"{key}.json", record.canonical() + b"\n")
        return record

    def run(self, *, run_id: str | None = None, **changes: Any) -> TreeRun:
        """A new run with run.json and an empty ledger."""
        made = TreeRun(self, *self.lay(self.science(**changes), len(self.runs), run_id))
        self.runs.append(made)
        self.save()
        return made

    def lay(self, science: Science, index: int, run_id: str | None = None) -> tuple[RunDir, RunRecord]:
        run = self.experiment.run(run_id or science.run_id())
        for folder in (run.path, run.ledger, run.items, run.logs):
            folder.mkdir(exist_ok=True)
        hashes = {"task_hash": sha("task"), "agent_hash": sha(science.agent), "code_hash": sha("code")}
        which = {"run_id": run.run_id, "experiment": self.path.name, "index": index, "created_at": CREATED}
        record = RunRecord(**which, science=science, recipe_hash=science.recipe.hash(), sandbox="auto", **hashes)
        atomic.write_bytes(run.record, readable_json(record.model_dump(mode="json")), durable=False)
        return run, record

    def save(self) -> None:
        spec = ExperimentSpec(
            name=self.path.name,
            matrix=Matrix(task=("arithmetic",), agent=("sft",), base_model=("org/tiny",)),
            budget=Budget(wall_clock_s=1200),
            protocol=self.protocol,
            sandbox=SandboxSpec(network=Network.OPEN),  # as the runs' science leaves it
        )
        runs = tuple(dict.fromkeys([*(r.dir.run_id for r in self.runs), *self.keeps]))
        hashes = {"spec_sha256": sha("spec"), "code_hash": sha("code")}
        record = ExperimentRecord(
            spec=spec, root="/nowhere", created_at=CREATED, runs=runs, grader=GraderSpec(), **hashes
        )
        atomic.write_json(self.experiment.resolved, record.model_dump(mode="json"))

    def finished(self, seed: int, solved: int, **changes: Any) -> TreeRun:
        """A run that solves `solved` report items (the base's first) with two submissions."""
        run = self.run(seed=seed, **changes).start()
        run.submit(100.0, outcomes(self.n_feedback, range(self.n_feedback // 4 + 2)))
        run.submit(400.0, outcomes(self.n_feedback, range(self.n_feedback // 2)))
        return run.seal().close(outcomes(self.n_report, range(solved)))

"""The parts of benchmarks/headline: what is staged and started, how it is followed, what is measured afterwards and kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.frozen_records import alive_jobs, read_baseline, read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.report.scores import paired_graded
from autorl_hpc.report.statistics import paired_clusters
from autorl_hpc.rollouts.engine import EngineFailed, WeightsChanged
from autorl_hpc.scoring.stats import paired
from autorl_hpc.states import Split

SMOKE_CLOCK = "3m"
WEAK_AGENT = "weak-sft-grpo-online"
STAGES = {"output/sft": "SFT", "output/corrected": "SFT on corrections", "output/grpo": "RL", "output/online": "RL"}
"""Under which paths the experts submit what, one stage after the other; RL's is its last checkpoint, better or not."""
KEPT_BYTES = 2_000_000
"""Of the summary that is kept in docs/results."""
QUIET_S = 30.0
"""Between two lines of progress where nothing new happened."""
LINE = 400
"""Of an agent's line: one of a trainer's figures."""


class Failed(Exception):
    """It can't go on; the text says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    headline: str
    task: str
    root: Path
    smoke: bool
    budget: str | None
    engine: str | None
    weak: bool
    seed: int

    @property
    def kind(self) -> str:
        """Task, aim and seed."""
        return f"{self.headline}{'-rl' if self.weak else ''}{f'-s{self.seed}' if self.seed else ''}"

    @property
    def name(self) -> str:
        """The experiment's."""
        return f"{self.kind}-headline{'-smoke' if self.smoke else ''}"

    @property
    def experiment(self) -> ExperimentDir:
        return Root(self.root).experiment(self.name)

    @property
    def run(self) -> RunDir:
        """The experiment's one run.

        Raises:
            Failed: it was never started.
        """
        runs = read_experiment(self.experiment).runs if self.experiment.resolved.is_file() else ()
        if len(runs) != 1:
            raise Failed(f"{self.experiment.path} holds {len(runs)} runs, not one: give another --root")
        return self.experiment.run(runs[0])


@dataclass
class Spent:
    """Wall-clock seconds of this script over all its calls: what a machine was held for."""

    path: Path
    begun: float
    earlier_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        value = reading.read_json_or_none(self.path)
        if isinstance(value, dict):
            self.earlier_s = [float(seconds) for seconds in value.get("calls_s", [])]

    def here_s(self) -> float:
        return time.monotonic() - self.begun

    def calls_s(self) -> list[float]:
        return [*self.earlier_s, round(self.here_s(), 1)]

    def note(self) -> None:
        """Writes down what this call has taken so far."""
        atomic.write_bytes(self.path, json.dumps({"calls_s": self.calls_s()}).encode("ascii"))


def say(text: str) -> None:
    """A line with the time of day."""
    print(f"{datetime.now(timezone.utc):%H:%M:%S} {text}", flush=True)


def suite(*arguments: str) -> None:
    """A command of the suite's.

    Raises:
        Failed: it did not end well.
    """
    done = subprocess.run([sys.executable, "-m", "autorl_hpc", *arguments], check=False)
    if done.returncode:
        raise Failed(f"`autorl-hpc {' '.join(arguments)}` ended with {done.returncode}: see its message")


def stage(plan: Plan, base: str, folder: Path | None, data: Path | None) -> None:
    """Brings task and model in; what is staged is only verified."""
    root = ("--root", str(plan.root))
    if plan.smoke:
        suite("stage", plan.task, "tiny", *root)
        return
    assert folder is not None and data is not None
    suite("stage", plan.task, "--from", str(data.resolve()), *root)
    suite("stage", base, "--from", str(folder.resolve()), *root)


def job_file(plan: Plan, repo: Path, packages: Sequence[str]) -> Path:
    """The shipped job with what depends on this machine: where the packages lie that agents may read."""
    spec: dict[str, Any] = yaml.safe_load(
        (repo / "jobs" / f"{plan.headline}-headline.yaml").read_text(encoding="utf-8")
    )
    spec["name"] = plan.name
    spec["matrix"] |= {"seed": plan.seed, **({"agent": WEAK_AGENT} if plan.weak else {})}
    if plan.smoke:
        spec["matrix"] |= {"task": plan.task, "base_model": "autorl/tiny"}
        spec["grader"] = {"engine": "transformers", "device": "cpu"}
        spec["budget"]["wall_clock"] = SMOKE_CLOCK
    if plan.engine is not None:
        spec["grader"] = {"engine": plan.engine} if plan.engine == "transformers" else spec["grader"]
    if plan.budget is not None:
        spec["budget"]["wall_clock"] = plan.budget
    spec.setdefault("sandbox", {})["readable"] = sorted(packages)
    path = plan.root / f"{plan.name}.yaml"
    atomic.write_bytes(path, yaml.safe_dump(spec, sort_keys=False).encode("utf-8"))
    return path


def launch(plan: Plan, job: Path) -> None:
    """Starts what doesn't run; of an experiment that is there, with the code that it began with."""
    again = ("--keep-frozen",) if plan.experiment.resolved.is_file() else ()
    suite("launch", str(job), *again, "--root", str(plan.root))


def closed(plan: Plan) -> bool:
    """Whether the run is closed."""
    return plan.run.run_id in reading.list_names(plan.experiment.finished)


def follow(plan: Plan, until: float, poll_s: float) -> bool:
    """Tells what happens until the run is closed and the jobs have ended, or the moment is there; whether it is over.

    Raises:
        Failed: no job runs any more and the run isn't closed.
    """
    told = 0.0
    said = ""
    while True:
        over, jobs = closed(plan), alive_jobs(plan.experiment)
        line = progress(plan)
        if line != said and (
            time.monotonic() - told > QUIET_S or line.split(" | ")[0] != said.split(" | ", maxsplit=1)[0]
        ):
            say(line)
            told, said = time.monotonic(), line
        if over:
            return True
        if not jobs:
            raise Failed(f"the jobs ended before the run was closed: read {plan.experiment.jobs}, then call again")
        if time.monotonic() > until:
            return False
        time.sleep(poll_s)


def progress(plan: Plan) -> str:
    """Scores so far and the agent's last line."""
    view = RunView.of(Ledger(plan.run).read())
    scores = [
        f"{submission.model_path} {_shown(view.score_of(submission))}"
        for submission in view.submissions.values()
        if submission.status == "accepted"
    ]
    try:
        lines = plan.run.agent_log.read_bytes()[-4000:].decode("utf-8", "replace").replace("\r", "\n").splitlines()
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{', '.join(scores) or 'nothing submitted'} | {last[:LINE]}"


def _shown(score: Any) -> str:
    if score is None:
        return "waits"
    return "no score" if score.evaluation.score is None else f"{score.evaluation.score:.1f}"


def measure_stages(plan: Plan) -> list[dict[str, Any]]:
    """What each stage of the expert's submitted last, on the report split: one after the other, by the run's own recipe and scorer and one
    engine. It chose nothing, and is no part of the ledger: measured when the run was closed.

    Raises:
        Failed: this machine can't score it.
    """
    from autorl_hpc.grading.background import RatingOverdue
    from autorl_hpc.grading.evaluate import Bench

    run, kept = plan.run, plan.root / f"{plan.name}.stages.json"
    known = reading.read_json_or_none(kept)
    if isinstance(known, list):
        return known
    record, accepted = read_run(run), RunView.of(Ledger(run).read()).accepted()
    last = {one.model_path: one for one in accepted if one.content_hash}
    bench = Bench(Root(plan.root), read_experiment(plan.experiment).spec.grader)
    measured: list[dict[str, Any]] = []
    try:
        for path, name in STAGES.items():
            if (one := last.get(path)) is None or one.content_hash is None:
                continue
            say(f"measuring {path} on the report split")
            weights = plan.experiment.artifacts / one.content_hash
            scored = bench.rate(bench.answer(record.science, weights, one.content_hash, Split.REPORT))
            outcomes = [(item.id, item.outcome, str(item.facts.get("cluster", item.id))) for item in scored.outcomes]
            told = {"path": path, "stage": name, "submission": one.submission_id, "outcomes": outcomes}
            measured.append({**told, "evaluation": scored.evaluation.model_dump(mode="json")})
    except (AutorlError, OSError, EngineFailed, WeightsChanged, RatingOverdue) as error:
        raise Failed(f"the stages can't be measured: {error}") from error
    finally:
        bench.drop_engine()
    atomic.write_bytes(kept, json.dumps(measured).encode("ascii"))
    return measured


def share(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a stage gave: the paired difference in points over the same items, with its interval at 95 %, over clusters where there are some."""
    ids, old, clusters = zip(*before["outcomes"], strict=True)
    same, new, _ = zip(*after["outcomes"], strict=True)
    assert ids == same
    if len(set(clusters)) < len(ids):
        found: Any = paired_clusters(old, new, clusters)
    else:
        found = paired(old, new) if {*old, *new} <= {0.0, 1.0} else paired_graded(old, new)
    points = {name: round(100.0 * getattr(found, name), 2) for name in ("difference", "low", "high")}
    return {"from": before["path"], "to": after["path"], **points, "p_value": round(found.p_value, 5)}


def keep(plan: Plan, out: Path, spent: Spent, stages: Sequence[dict[str, Any]]) -> Path:
    """Write the reports, and keep the run's summary and the headline's page."""
    suite("report", str(plan.experiment.path), "--quiet", "--no-figures")
    folder = out / f"{plan.kind}-{datetime.now(timezone.utc):%Y-%m-%d}{'-smoke' if plan.smoke else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    source = plan.run.report / "summary.json"
    if source.is_file() and source.stat().st_size <= KEPT_BYTES:
        kept = {key: value for key, value in json.loads(source.read_bytes()).items() if key != "story"}
        atomic.write_bytes(folder / source.name, (json.dumps(kept, indent=1) + "\n").encode("ascii"))
    facts = headline(plan, spent, stages)
    atomic.write_bytes(folder / "headline.json", (json.dumps(facts, indent=1) + "\n").encode("ascii"))
    atomic.write_bytes(folder / "headline.md", page(facts).encode("utf-8"))
    return folder


def headline(plan: Plan, spent: Spent, stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of one headline; scores are null where nothing was measured.

    Raises:
        Failed: the run is not closed.
    """
    record, view = read_run(plan.run), RunView.of(Ledger(plan.run).read())
    if view.closed is None:
        raise Failed(f"{plan.run.path} is not closed")
    key = view.closed.baseline_report
    base = read_baseline(plan.experiment.baselines, key) if key else None
    chosen = view.submissions.get(view.closed.selected) if view.closed.selected else None
    return {
        "task": record.science.task,
        "agent": record.science.agent,
        "base_model": record.science.base_model,
        "seed": record.science.seed,
        "run_id": record.run_id,
        "host": host_name(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "engine": None if base is None else base.engine.model_dump(mode="json"),
        "report_split": {
            "base": _facts(base.evaluation if base else None),
            "stages": [
                {"path": one["path"], "stage": one["stage"], **_facts(Evaluation.model_validate(one["evaluation"]))}
                for one in stages
            ],
            "shares": [share(one, other) for one, other in pairwise(stages)],
            "selected": {**_facts(view.closed.report), "path": chosen.model_path if chosen else None},
        },
        "feedback_split": [
            {
                "path": one.model_path,
                "elapsed_s": one.elapsed_s,
                **_facts(score.evaluation if (score := view.score_of(one)) else None),
            }
            for one in view.accepted()
        ],
        "agent_s": view.sealed.elapsed_s if view.sealed else None,
        "calls_s": spent.calls_s(),
        "smoke": plan.smoke,
    }


def _facts(evaluation: Evaluation | None) -> dict[str, Any]:
    if evaluation is None:
        return {"score": None, "n": None, "reason": "not measured"}
    return {"score": evaluation.score, "n": evaluation.n, "reason": evaluation.reason}


def page(facts: dict[str, Any]) -> str:
    """The same for people."""
    split = facts["report_split"]
    given = {each["to"]: each for each in split["shares"]}
    lines = [
        f"# {facts['task']}: {facts['agent']} with {facts['base_model']}, seed {facts['seed']}",
        "",
        "A smoke test: the figures mean nothing.\n" if facts["smoke"] else "One run, one seed.\n",
        "| checkpoint | report split | what the stage gave, on the same items |",
        "|---|--:|--:|",
        f"| base model | {_number(split['base']['score'])} | |",
        *(
            f"| after {one['stage']}: {one['path']} | {_number(one['score'])} | {_share(given.get(one['path']))} |"
            for one in split["stages"]
        ),
        f"| selected by the expert: {split['selected']['path']} | {_number(split['selected']['score'])} | |",
        "",
        f"Items: {split['selected']['n']}. The stages' last checkpoints were measured by one engine when the run was closed, and chose nothing. The "
        f"agent ran {_minutes(facts['agent_s'])}; with staging, grading and reports the machine was held {_minutes(sum(facts['calls_s']))}, in "
        f"{len(facts['calls_s'])} calls.",
        "",
        "| submitted | after | feedback split |",
        "|---|--:|--:|",
        *(
            f"| {one['path']} | {_minutes(one['elapsed_s'])} | {_number(one['score'])} |"
            for one in facts["feedback_split"]
        ),
        "",
        f"Run `{facts['run_id']}`, {facts['date']}. Engine: {_engine(facts['engine'])}.",
        "",
    ]
    return "\n".join(lines)


def _share(told: dict[str, Any] | None) -> str:
    if told is None:
        return ""
    return f"{told['difference']:+.1f} [{told['low']:+.1f}, {told['high']:+.1f}], p {told['p_value']:.4f}"


def _engine(engine: dict[str, Any] | None) -> str:
    if engine is None:
        return "unknown"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(engine.get("versions", {}).items()))
    return f"{engine.get('backend')} on {engine.get('device')}, {engine.get('dtype')} ({versions})"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}"


def _minutes(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds / 60:.1f} min"

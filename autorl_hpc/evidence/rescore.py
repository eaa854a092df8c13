"""`rescore`: score an exported run again with the grader's own code, and compare.

Three things must hold: the evidence (chain, items and scores fit each other), the weights (the chain names them) and the score
(what this machine measures equals the claim, up to noise). None of these needs trust in the bundle's maker.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from autorl_hpc.cluster.profile import load_profile
from autorl_hpc.errors import AutorlError, Exit, Refused
from autorl_hpc.evidence import export
from autorl_hpc.evidence.unpack import (
    check_shapes,
    check_task,
    judge_spec,
    selected_of,
    unpack_evidence,
    verify_unpacked,
    weights_allowed,
)
from autorl_hpc.evidence.verify import ANCHORED_NOTE, NOTE, ItemRow, VerifyResult, name_same_runs, read_rows
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import baseline_key, read_baseline, read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import Claims, HeartbeatWatch
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.attempts import Attempts, Baselines, ClusterTrouble, EvaluationRequest, NotReady
from autorl_hpc.grading.engines.weights_cache import default_bytes
from autorl_hpc.grading.engines.worker_process import name_program
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.records.exchange import Baseline, EvidenceManifest
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.find import runs_on_disk
from autorl_hpc.report.run_folder import marks_of, read_chain
from autorl_hpc.scoring.stats import ALPHA, mcnemar_midp
from autorl_hpc.stage.sources import Say, work_folder
from autorl_hpc.states import Fault, Split

# --- comparing two evaluations of one checkpoint on the same items

PURE_SCORERS = ("gsm8k", "gsm8k-marked", "gsm8k-opencompass", "deepsearchqa-exact")
"""Scorers whose outcome follows from item and text alone. Others use a judge, a clock, an environment or a task's own code,
and may give one text two outcomes."""

SCORE_TOLERANCE = 1e-6  # Points; the sum may run in another order

Word = Literal["identical", "within noise", "differs", "older version", "not scored"]


@dataclass
class Compared:
    """The claimed score of one model and the score measured here.

    Attributes:
        changed: items whose outcome differs here: `up` are higher here, `down` lower.
        same_texts: items whose answers are the same text, by hash.
        same_text_other_outcome: items with the same text and another outcome, although the scorer sees only the text.
        p_value: McNemar's mid-p over the changed items: how likely chance alone is so lopsided.
    """

    what: Literal["selected", "base"]
    word: Word
    why: str
    claimed: float | None
    here: float | None
    n: int = 0
    changed: int = 0
    up: int = 0
    down: int = 0
    same_texts: int = 0
    same_text_other_outcome: int = 0
    p_value: float | None = None
    same_engine: bool = False
    claimed_engine: str | None = None
    engine: str | None = None

    @property
    def difference(self) -> float | None:
        """Return the score here minus the claimed one, in points; None if one is missing."""
        return None if self.claimed is None or self.here is None else self.here - self.claimed

    @property
    def holds(self) -> bool:
        return self.word in ("identical", "within noise")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        return {**vars(self), "difference": self.difference, "holds": self.holds}

    def as_text(self) -> str:
        """Return one line of text."""
        if self.difference is None:
            return f"{self.what}: {self.word}: {self.why}"
        agreed = f"{self.n - self.changed} of {self.n} outcomes and {self.same_texts} texts the same"
        return (
            f"{self.what}: {self.word}: claimed {self.claimed:.2f}, here {self.here:.2f} "
            f"({self.difference:+.2f}), {agreed}. {self.why}"
        )


def compare(
    what: Literal["selected", "base"],
    claimed: Evaluation,
    claimed_rows: Mapping[str, ItemRow],
    here: Evaluation,
    rows: Mapping[str, ItemRow],
    *,
    scorer: str,
    noise: float,
    reproducible: bool = False,
) -> Compared:
    """Compare two evaluations of the same weights, item by item. `noise`: difference, in points, between two
    measurements of the base model on this machine. The bundle's own figure is not used, because it is a claim too.
    `reproducible`: the base model's answers here equal the claimed ones word for word, so noise can't explain other
    answers of the checkpoint."""
    found = Compared(
        what,
        "not scored",
        (here.reason if here.score is None else claimed.reason) or "there is no score",
        claimed.score,
        here.score,
        n=len(rows),
        claimed_engine=claimed.engine_hash,
        engine=here.engine_hash,
        same_engine=claimed.engine_hash == here.engine_hash is not None,
    )
    if claimed.score is None or here.score is None:
        return found
    if claimed_rows.keys() != rows.keys():
        found.word, found.why = "differs", "the bundle's items are not those of the split that is staged here"
        return found
    for name, new in rows.items():
        old = claimed_rows[name]
        if new.outcome is not None and old.outcome is not None:
            found.up += new.outcome > old.outcome
            found.down += new.outcome < old.outcome
        if old.output_sha256 == new.output_sha256:
            found.same_texts += 1
            found.same_text_other_outcome += old.outcome != new.outcome
    found.changed, found.p_value = found.up + found.down, mcnemar_midp(found.up, found.down)
    found.word, found.why = _judge(found, noise, scorer, reproducible)
    same_text = found.same_text_other_outcome and scorer in PURE_SCORERS
    if claimed.prompts_sha256 is None and not (found.holds or reproducible or same_text):
        found.why = f"it was scored by an older version, which kept no hash of its prompts; {found.why}"
        found.word = "older version"
    elif claimed.prompts_sha256 not in (None, here.prompts_sha256):
        found.word, found.why = "differs", "the prompts asked here are not those that the score names by their hash"
    return found


def _judge(found: Compared, noise: float, scorer: str, reproducible: bool) -> tuple[Word, str]:
    difference, p_value = abs(found.difference or 0.0), found.p_value or 0.0
    if found.same_text_other_outcome and scorer in PURE_SCORERS:
        why = "answers are the same text as claimed, and that text has another outcome"
        return "differs", f"{found.same_text_other_outcome} {why}"
    if not found.changed and difference <= SCORE_TOLERANCE:
        return "identical", "Every item has the outcome that was claimed."
    if reproducible and found.changed:
        return "differs", "the base model's answers are word for word as claimed, and this checkpoint's are not"
    moved = f"{found.up} items up and {found.down} down"
    if p_value < ALPHA:
        return "differs", f"{moved} are more than chance (p {p_value:.4f})"
    chance = f"{moved} may be chance (p {p_value:.2f})"
    if difference > noise + SCORE_TOLERANCE:
        return "differs", f"{chance}, but the base model's repeats here differ by {noise:.2f} points only"
    return "within noise", f"The base model's own repeats here differ by {noise:.2f}, {chance}."


MAX_BATCH_TOKENS = 1 << 20
"""A bundle may ask for its run's batch size, which makes answers alike, but not for all of this machine's memory."""


DEVICES: Final = ("auto", "cpu", "cuda")
ENGINES: Final = get_args(GraderSpec.model_fields["engine"].annotation)


@dataclass(frozen=True)
class RescoreOptions:
    """Options of `rescore` besides the bundle."""

    device: str = "auto"
    judge_url: str | None = None
    judge_key: Path | None = None
    expect: str | None = None
    engine: str | None = None
    cluster: str | None = None


@dataclass
class Rescored:
    """The result of `rescore`.

    Attributes:
        problems: faults of the evidence; if there is one, nothing was scored.
        anchored: whether the run's head is the one passed with `--expect`; None if none was passed.
    """

    manifest: EvidenceManifest
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    anchored: bool | None = None
    engine: dict[str, Any] | None = None
    claimed_engine: dict[str, Any] | None = None
    noise_here: float | None = None
    noise_claimed: float | None = None
    compared: list[Compared] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.problems and bool(self.compared) and all(one.holds for one in self.compared)

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        if self.problems:
            return f"the evidence does not hold: {self.problems[0]}"
        failing = [f"{one.what} {one.word}" for one in self.compared if not one.holds]
        return "; ".join(failing) if not self.holds else "the evidence is whole, and the score was measured again"

    @property
    def older(self) -> bool:
        """Return whether what does not hold is only what an older version scored, which this one can't ask again."""
        failing = {one.word for one in self.compared if not one.holds}
        return not self.problems and failing == {"older version"}

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        head, names = (
            self.manifest.head,
            "problems notes engine claimed_engine noise_here noise_claimed holds older verdict",
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            **{
                "run_id": head.run_id,
                "experiment": self.manifest.experiment,
                "head": head.head,
                "entries": head.entries,
            },
            "anchored": bool(self.anchored),
            **{one.what: one.as_dict() for one in self.compared},
            "note": ANCHORED_NOTE if self.anchored else NOTE,
        }

    def as_lines(self) -> list[str]:
        """Return the result as text lines."""
        word = "HOLDS  " if self.holds else "OLDER VERSION" if self.older else "DOES NOT HOLD"
        lines = [f"{word}  {self.manifest.run_id}: {self.verdict}"]
        lines += [f"         {problem}" for problem in self.problems]
        lines += [f"         {one.as_text()}" for one in self.compared]
        lines += [f"         {note}" for note in self.notes]
        lines += [f"         head {self.manifest.head.head} ({self.manifest.head.entries} entries)"]
        return [*lines, "", ANCHORED_NOTE if self.anchored else NOTE]


def rescore_bundle(root: Root, bundle: Path, asked: RescoreOptions, say: Say = lambda _: None) -> Rescored:
    """Unpack, verify and score `bundle` in a temporary folder below `root`. Raises AutorlError: the bundle is not an
    exported run or is damaged; the task, split, recipe, scorer or base model staged here is another one; this machine
    can't score."""
    for option, value, known in (("device", asked.device, DEVICES), ("engine", asked.engine or ENGINES[0], ENGINES)):
        if value not in known:
            raise AutorlError(f"--{option} {value}: it is {' or '.join(known)}", next_step="choose one")
    # Never the bundle's profile: it names a program to run.
    name_program(load_profile(asked.cluster) if asked.cluster else None)
    if not root.path.is_dir():
        advice = "give the root that the task is staged in"
        raise AutorlError("there is no such folder", where=root.path, next_step=advice)
    with work_folder(root.path, "rescore", mode=0o700) as work:
        manifest = unpack_evidence(bundle, work, lambda head: weights_allowed(root, head))
        done = Rescored(manifest)
        experiment = ExperimentDir(work / export.EXPERIMENT)
        verdict = verify_unpacked(experiment, manifest)
        done.problems += verdict.problems
        name_same_runs([verdict, *marked_runs(root)])
        done.notes += [*verdict.unseen, *verdict.notes]
        if done.problems:
            return done
        run = experiment.run(manifest.run_id)
        ledger, record = Ledger(run), read_run(run)
        view = RunView.of(ledger.read())
        if asked.expect is not None:
            done.anchored = ledger.head().startswith(asked.expect)
            if not done.anchored:
                done.problems.append(f"the ledger's head is {ledger.head()}, not the one that you expect")
        done.problems += _otherwise_than_claimed(root, experiment, manifest, view, record)
        if not done.problems:
            done.notes += check_task(root, record)
            say(f"{manifest.run_id}: the evidence is whole; scoring on {record.science.splits[Split.REPORT].n} items")
            _score_again(root, experiment, ExperimentDir(work / "again"), record, view, asked, done)
        return done


def marked_runs(root: Root) -> Iterator[VerifyResult]:
    """Yield the readable runs below the root: the run of a bundle may be one of them under another name."""
    for experiment in map(ExperimentDir, sorted(root.runs.iterdir()) if root.runs.is_dir() else ()):
        for run_id in runs_on_disk(experiment) if experiment.path.is_dir() else ():
            with suppress(AutorlError, OSError, ValueError):
                run = experiment.run(run_id)
                chain = read_chain(run)
                marks = marks_of(run, chain.view, chain.entries)
                yield VerifyResult(run_id, experiment=experiment.path.name, hashes=(chain.genesis,), marks=marks)


def _otherwise_than_claimed(
    root: Root, experiment: ExperimentDir, manifest: EvidenceManifest, view: RunView, record: RunRecord
) -> Iterator[str]:
    """Check that there is a score of the selected checkpoint, and that its weights, whose hash is checked, fit the base model."""
    report, selected = view.closed.report if view.closed else None, selected_of(view)
    if report is None:
        yield "the run was not closed with a score on the report split: there is nothing to compare"
        return
    content = selected.content_hash if selected else record.science.base_model_content_hash
    if (report.split, report.content_hash, report.recipe_hash) != (Split.REPORT, content, record.recipe_hash):
        yield "the closing entry's score is not one of the selected checkpoint on the report split by the run's recipe"
    elif manifest.weights is not None:
        folder = experiment.artifacts / manifest.weights.content_hash
        try:
            problem = check_shapes(root, manifest.base_model, folder, manifest.weights.not_in_hash)
        except Refused as error:
            problem = error.message
        if problem:
            yield f"the weights are no checkpoint of the base model: {problem}"


def grader_here(spec: GraderSpec, asked: RescoreOptions) -> GraderSpec:
    """Return the run's grader settings, which affect answers and rounding, with the caller's device and engine, and no more
    threads, batch tokens and cache than this machine has."""
    most_gib = default_bytes() / 2**30
    return spec.model_copy(
        update={
            "engine": asked.engine or spec.engine,
            "device": asked.device,
            "threads": min(spec.threads, os.cpu_count() or 1),
            "batch_tokens": min(spec.batch_tokens, MAX_BATCH_TOKENS),
            "cache_gib": None if spec.cache_gib is None else min(spec.cache_gib, most_gib),
        }
    )


def _score_again(
    root: Root,
    experiment: ExperimentDir,
    fresh: ExperimentDir,
    record: RunRecord,
    view: RunView,
    asked: RescoreOptions,
    done: Rescored,
) -> None:
    """Fill `done` with the comparisons: first the base model, whose noise the checkpoint's comparison needs. `fresh` holds what is
    measured here, never the bundle's records."""
    science, judge = record.science, judge_spec(record.science.recipe, asked.judge_url, asked.judge_key)
    assert view.closed is not None and view.closed.report is not None
    for folder in fresh.folders():
        folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(root, grader_here(read_experiment(experiment).grader, asked), lambda: judge)
    grader = f"rescore-{secrets.token_hex(4)}"
    claims = Claims(fresh.claims, grader, host_name(), HeartbeatWatch(fresh.graders, GraderSpec().stale_after_s))

    def items(place: ExperimentDir, key: str) -> dict[str, ItemRow]:
        return _rows(place.baselines / f"{key}.items.jsonl.gz")

    try:
        base = Baselines(fresh, claims, bench, grader).ensure(science, Split.REPORT)
        noise = base.noise()
        judged = functools.partial(compare, scorer=science.recipe.scorer, noise=noise or 0.0)
        done.engine, done.noise_here = _facts(base), noise
        key, same = view.closed.baseline_report, False
        claimed = read_baseline(experiment.baselines, key) if key else None
        if claimed is None:
            done.notes.append("the run names no score of its base model")
        else:
            done.claimed_engine, done.noise_claimed = _facts(claimed), claimed.noise()
            theirs, mine = items(experiment, claimed.key), items(fresh, base.key)
            again = judged("base", claimed.evaluation, theirs, base.evaluation, mine)
            done.compared.append(again)
            same = 0 < again.same_texts == again.n
        report, submission = view.closed.report, selected_of(view)
        if submission is None or submission.is_base or submission.content_hash is None:
            theirs = items(experiment, baseline_key(science, Split.REPORT, report.engine_hash or ""))
            here, mine = base.evaluation, items(fresh, base.key)
        else:
            name = f"{submission.submission_id:06d}.{Split.REPORT}.jsonl.gz"
            theirs_path, mine_path = (one.run(record.run_id).items / name for one in (experiment, fresh))
            what = (science, submission.content_hash, Split.REPORT, mine_path, "the bundle's checkpoint")
            here = Attempts(experiment, bench).evaluate(EvaluationRequest(*what))
            theirs, mine = _rows(theirs_path), _rows(mine_path)
        done.compared.append(judged("selected", report, theirs, here, mine, reproducible=same))
    except (ClusterTrouble, NotReady) as error:
        raise AutorlError(
            f"this machine can't score it: {error}",
            fault=Fault.CLUSTER,
            next_step="see the message; another --device may do",
            exit_code=Exit.ENVIRONMENT,
        ) from error
    finally:
        bench.drop_engine()


def _rows(path: Path) -> dict[str, ItemRow]:
    try:
        return {row.item_id: row for row in read_rows(path.name, reading.read_bytes(path))}
    except FileNotFoundError:
        return {}  # the score is null
    except ValueError as error:
        raise AutorlError(str(error), where=path, exit_code=Exit.FAILED) from None


def _facts(baseline: Baseline) -> dict[str, Any]:
    return {"hash": baseline.engine.digest(), **baseline.engine.model_dump(mode="json")}

"""Evaluation attempts: whose fault a failure is, items files, baselines. An artifact is blamed only if it broke the engine
twice and a fresh engine on the same node can score the base model; else the cluster is at fault."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts, atomic
from autorl_hpc.files.frozen_records import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.queue import Claims
from autorl_hpc.grading.background import RatingOverdue, contained, overdue_s
from autorl_hpc.grading.evaluate import Bench, ItemOutcome, Scored, SplitAnswers, items_bytes
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.engine import WeightsChanged
from autorl_hpc.states import Fault, Split

log = logging.getLogger("autorl_hpc.grader")
T = TypeVar("T")

# --- items files
# Another grader may take the entry over. So the file is written under a hidden name with its hash, and linked to its own name if
# that is free; after the commit, any grader puts the committed score's file in the place of another.


def items_file(run: RunDir, number: int, split: Split) -> Path:
    """Return the path of a submission's items file on a split."""
    return run.items / f"{number:06d}.{split}.jsonl.gz"


def offer(path: Path, outcomes: Sequence[ItemOutcome]) -> str:
    """Write the items file of a score that is about to be committed and return its sha256. An existing file at `path` is kept."""
    data = items_bytes(outcomes)
    sha256 = hashlib.sha256(data).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(_hidden(path, sha256), data)
    # Another grader's file, our own from an earlier try, or the same file was committed and moved meanwhile.
    with suppress(FileExistsError, FileNotFoundError):
        os.link(_hidden(path, sha256), path)
    atomic.fsync_directory(path.parent)
    return sha256


def settle(path: Path, committed: str | None, own: str | None = None) -> bool:
    """Put the items file of the committed score (its `items_sha256`) in place, and drop the one that the caller offered
    (`own`). Return whether it is there: a client may not see it for a while. Idempotent; any grader may call it."""
    if own is not None and own != committed:
        atomic.unlink_quietly(_hidden(path, own))
    if committed is None:
        return True
    try:
        os.replace(_hidden(path, committed), path)
    except FileNotFoundError:  # another grader was faster, or it was done before
        return path.exists()
    atomic.unlink_quietly(_hidden(path, committed))  # a rename of two links to one file leaves both
    atomic.fsync_directory(path.parent)
    return True


def not_seen(path: Path) -> OSError:
    """Return the error for an items file that was written and isn't seen: its entry goes back to the queue."""
    return OSError(errno.ESTALE, "written, and not seen here yet", str(path))


def _hidden(path: Path, mark: str) -> Path:
    return path.with_name(f"{atomic.TEMPORARY_PREFIX}{path.name}.{mark}")


DEATHS_BEFORE_BLAME = 3
"""Graders that die while they hold an entry before the artifact is blamed. Nodes fail too; the design requires at least two."""
CHECK_ITEMS = 4
"""Items on which the base model is checked: enough to detect a broken engine, and about a second of work."""
MISSING_PATIENCE_S = 90.0
"""An NFS client may serve a stale listing for a minute, in which a folder made by another node is missing."""


class NotReady(Exception):
    """A prerequisite is still being computed elsewhere or is not visible yet; try again later."""


class ClusterTrouble(Exception):
    """This node can't score even the base model; the entry goes back to the queue."""

    def __init__(self, words: str, fault: Fault | None = None) -> None:
        super().__init__(words)
        self.fault = fault or Fault.CLUSTER


@dataclass(frozen=True)
class EvaluationRequest:
    """An artifact to be scored on a split; `items` is where its items file belongs, `entry` and `generation` are those of the
    claim, and `waiting_s` is how long the entry has waited in the queue."""

    science: Science
    content_hash: str
    split: Split
    items: Path
    entry: str
    generation: int = 1
    waiting_s: float | None = None


@dataclass
class Attempts:
    """Evaluates artifacts for one grader and sorts failures by fault."""

    experiment: ExperimentDir
    bench: Bench
    _missing_since: dict[str, float] = field(default_factory=dict)

    def evaluate(self, request: EvaluationRequest, overdue: bool = False) -> Evaluation:
        """Evaluate an artifact; return a score with its items file written, or a null score with a fault. Raises
        ClusterTrouble: this node can't do it; NotReady: it is not visible yet. `overdue`: `finish` failed in time, which counts
        as a try."""
        rate = self.bench.rate
        return self._tried(request, lambda w: self._offer_items(request, rate(self._answers(request, w))), overdue)

    def answer(self, request: EvaluationRequest) -> SplitAnswers | Evaluation:
        """Run the engine's part of `evaluate`; return its answers for `finish`, or a null score with a fault."""
        return self._tried(request, lambda weights: self._answers(request, weights))

    def finish(self, request: EvaluationRequest, answered: SplitAnswers) -> Evaluation:
        """Run the rest of `evaluate`: rate the answers and write the items file. May run in another thread. Any other error than
        ClusterTrouble may be the artifact's fault; `evaluate` finds out."""
        with _node_troubles():
            return self._offer_items(request, self.bench.rate(answered))

    def _answers(self, request: EvaluationRequest, weights: Path) -> SplitAnswers:
        return self.bench.answer(request.science, weights, request.content_hash, request.split)

    def _tried(self, request: EvaluationRequest, do: Callable[[Path], T], overdue: bool = False) -> T | Evaluation:
        """Return the result of `do`, or a null score with a fault if it fails twice while the base model succeeds."""
        deaths, content_hash = request.generation - 1, request.content_hash
        if deaths >= DEATHS_BEFORE_BLAME:
            self._check_base(request, f"{deaths} graders died while they scored {request.entry}")
            words = f"{deaths} graders died while scoring it; the base model is scored without trouble on the same node"
            return self._null(request, Fault.ARTIFACT, words)
        if not artifacts.artifact_ready(self.experiment.artifacts, content_hash):
            since = self._missing_since.setdefault(content_hash, time.monotonic())
            if time.monotonic() - since < MISSING_PATIENCE_S:
                raise NotReady
            return self._null(request, Fault.CLUSTER, f"the accepted copy artifacts/{content_hash[:16]}... is gone")
        problem, broke, whole_split = "", "", False
        for last_try in (False, True):
            try:
                with contained(), _node_troubles():
                    return do(self.experiment.artifacts / content_hash)
            except WeightsChanged as error:
                if last_try:  # a second read avoids a stale NFS cache
                    words = f"the accepted copy was changed after intake: {error}"
                    return self._null(request, Fault.CLUSTER, words)
            except ClusterTrouble:
                raise
            except RatingOverdue as error:
                log.exception("evaluation of %s failed", request.entry)
                problem, broke, whole_split = str(error), "rating its answers came to no end", True
                if overdue:
                    break
                overdue = True
            except Exception as error:
                log.exception("evaluation of %s failed", request.entry)
                problem, broke = f"{type(error).__name__}: {error}"[:500], "the engine failed on it"
                whole_split = False
                self.bench.drop_engine()
        self._check_base(request, problem, whole_split)
        return self._null(request, Fault.ARTIFACT, f"{broke} twice, and works for the base model: {problem}")

    def _offer_items(self, request: EvaluationRequest, scored: Scored) -> Evaluation:
        started = time.monotonic()
        digest = offer(request.items, scored.outcomes)
        times = {"commit_s": time.monotonic() - started, "waiting_s": request.waiting_s}
        timings = scored.evaluation.timings.model_copy(update=times)
        return scored.evaluation.model_copy(update={"items_sha256": digest, "timings": timings})

    def _check_base(self, request: EvaluationRequest, problem: str, whole_split: bool = False) -> None:
        """Raise ClusterTrouble if the base model can't be scored on this node either. `whole_split`: a few items can't show that
        all of them are too slow."""
        science, limit = request.science, None if whole_split else CHECK_ITEMS
        try:
            with contained():
                self.bench.evaluate_base(science, request.split, limit=limit)
        except Exception as error:
            late = overdue_s(error) > 0
            if not late:
                self.bench.drop_engine()
            raise ClusterTrouble(
                f"the base model can't be scored on this node either ({error}); first seen: {problem}",
                Fault.GRADER if late else Fault.CLUSTER,
            ) from error

    def _null(self, request: EvaluationRequest, fault: Fault, reason: str) -> Evaluation:
        return Evaluation(
            split=request.split,
            content_hash=request.content_hash,
            score=None,
            fault=fault,
            reason=reason,
            recipe_hash=request.science.recipe.hash(),
            engine_hash=self.bench.engine_hash,
        )


@contextmanager
def _node_troubles() -> Iterator[None]:
    """Turn errors of the node, vault, judge or file system into ClusterTrouble, because they say nothing about the artifact."""
    try:
        yield
    except AutorlError as error:
        raise ClusterTrouble(str(error), error.fault) from error
    except OSError as error:
        raise ClusterTrouble(f"{type(error).__name__}: {error}") from error


@dataclass
class Baselines:
    """Measures base models, once per model, split, recipe and engine hash; a second pass measures the engine's own noise."""

    experiment: ExperimentDir
    claims: Claims
    bench: Bench
    grader: str
    _known: dict[str, Baseline] = field(default_factory=dict)

    def get(self, science: Science, split: Split) -> Baseline | None:
        """Return the baseline measured by the running engine, or None."""
        key = self._key(science, split)
        if key not in self._known:
            found = read_baseline(self.experiment.baselines, key)
            if found is None:
                return None
            settle(self._items(key), found.evaluation.items_sha256)  # its publisher may have died before doing this
            self._known[key] = found  # a baseline is measured once and never replaced
        return self._known[key]

    def ensure(self, science: Science, split: Split) -> Baseline:
        """Return the baseline, measuring it if needed. Raises NotReady: another grader measures it."""
        found = self.get(science, split)
        if found is not None:
            return found
        key = self._key(science, split)
        entry = f"baseline-{key[:32]}"
        generation = self.claims.take(entry, self.claims.current())
        if generation is None:
            raise NotReady
        try:  # another grader may have finished between the check and the claim
            found = self.get(science, split) or self._measure(science, split, key)
        finally:
            self.claims.give_back(entry, generation)
        if found is None:
            raise NotReady
        return found

    def _key(self, science: Science, split: Split) -> str:
        return baseline_key(science, split, self.bench.engine(science).identity.digest())

    def _measure(self, science: Science, split: Split, key: str) -> Baseline | None:
        log.info("measuring the base model %s on the %s split of %s", science.base_model, split, science.task)
        first = self.bench.evaluate_base(science, split)
        backwards = list(range(first.evaluation.n))[::-1]
        second = self.bench.evaluate_base(science, split, order=backwards)
        changed = sum(a.outcome != b.outcome for a, b in zip(first.outcomes, second.outcomes, strict=True))
        if found := self.get(science, split):
            return found  # another grader took over because this one was slow
        items = offer(self._items(key), first.outcomes)
        identity = self.bench.identity
        assert identity is not None  # set by evaluate()
        record = Baseline(
            key=key,
            task=science.task,
            base_model=science.base_model,
            evaluation=first.evaluation.model_copy(update={"items_sha256": items}),
            repeat_score=second.evaluation.score,
            repeat_changed_items=changed,
            engine=identity,
            grader=self.grader,
        )
        atomic.publish_bytes(self.experiment.baselines / f"{key}.json", record.canonical() + b"\n")
        found = self.get(science, split)
        if found is not None:
            settle(self._items(key), found.evaluation.items_sha256, own=items)
        return found

    def _items(self, key: str) -> Path:
        return self.experiment.baselines / f"{key}.items.jsonl.gz"

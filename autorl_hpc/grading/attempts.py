"""One evaluation with its failures sorted: whose fault is it when an engine breaks on a checkpoint?

An artifact is blamed only after it broke the engine twice and the base model is answered by a fresh engine on the same
node. Where the base model fails too, the fault is the cluster's and the work goes back to the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.grading.evaluate import Answered, Bench, Scored
from autorl_hpc.grading.items import offer
from autorl_hpc.grading.patience import RatingOverdue, overdue_s
from autorl_hpc.grading.stopping import contained
from autorl_hpc.records.ledger import Evaluation
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.engine import WeightsChanged
from autorl_hpc.states import Fault, Split

log = logging.getLogger("autorl_hpc.grader")

DEATHS_BEFORE_BLAME = 3
"""Graders that died while they held an entry. Three, because nodes do die; two is the design's lower limit."""

CHECK_ITEMS = 4
"""Items on which the base model is tried: enough to see a broken engine, a second of work."""


MISSING_PATIENCE_S = 90.0
"""An NFS client may go on for a minute with a listing in which a folder that another node made is missing."""


T = TypeVar("T")


class NotReady(Exception):
    """Something that the work needs is still being done, or not yet seen, elsewhere; try again later."""


class ClusterTrouble(Exception):
    """The node can't score even the base model: the entry goes back to the queue."""

    def __init__(self, words: str, fault: Fault | None = None) -> None:
        super().__init__(words)
        self.fault = fault or Fault.CLUSTER


@dataclass
class Attempts:
    """Evaluates artifacts for one grader."""

    experiment: ExperimentDir
    bench: Bench
    _missing_since: dict[str, float] = field(default_factory=dict)

    def evaluate(
        self,
        science: Science,
        content_hash: str,
        split: Split,
        items: Path,
        entry: str,
        generation: int,
        waiting_s: float | None = None,
        overdue: bool = False,
    ) -> Evaluation:
        """The evaluation of an artifact: a score with its items file written, or null with a fault.

        Args:
            waiting_s: how long its entry stood in the queue.
            overdue: its answers were not rated in time just before, by `finish`: that was a first try.

        Raises:
            ClusterTrouble: this node can't do it; nothing is said about the artifact.
            NotReady: the artifact can't be seen yet.
        """

        def whole(weights: Path) -> Evaluation:
            return self._offer_items(self.bench.evaluate(science, weights, content_hash, split), items, waiting_s)

        return self._tried(science, content_hash, split, entry, generation, whole, overdue)

    def answer(
        self, science: Science, content_hash: str, split: Split, entry: str, generation: int
    ) -> Answered | Evaluation:
        """The engine's part of `evaluate`, for `finish`; or null with a fault."""

        def ask(weights: Path) -> Answered:
            return self.bench.answer(science, weights, content_hash, split)

        return self._tried(science, content_hash, split, entry, generation, ask)

    def finish(self, answered: Answered, items: Path, waiting_s: float | None) -> Evaluation:
        """The rest of `evaluate`: rates the answers and writes the items file. May be called by another thread.

        Raises:
            ClusterTrouble: see `evaluate`. Anything else may be the artifact's fault: `evaluate` finds out.
        """
        with _node_troubles():
            return self._offer_items(self.bench.rate(answered), items, waiting_s)

    def _tried(
        self,
        science: Science,
        content_hash: str,
        split: Split,
        entry: str,
        generation: int,
        do: Callable[[Path], T],
        overdue: bool = False,
    ) -> T | Evaluation:
        """What `do` makes of the artifact; null with a fault if it fails, and fails again, and the base model does not."""
        if generation > DEATHS_BEFORE_BLAME:
            self._check_base(science, split, f"{generation - 1} graders died while they scored {entry}")
            return self._null(
                science,
                content_hash,
                split,
                Fault.ARTIFACT,
                f"{generation - 1} graders died while scoring it; the base model is scored without trouble on the same node",
            )
        weights = self.experiment.artifacts / content_hash
        if not artifacts.artifact_ready(self.experiment.artifacts, content_hash):
            since = self._missing_since.setdefault(content_hash, time.monotonic())
            if time.monotonic() - since < MISSING_PATIENCE_S:
                raise NotReady
            return self._null(
                science,
                content_hash,
                split,
                Fault.CLUSTER,
                f"the accepted copy artifacts/{content_hash[:16]}... is gone",
            )
        problem, broke, whole_split = "", "", False
        for last_try in (False, True):
            try:
                with contained(), _node_troubles():
                    return do(weights)
            except WeightsChanged as error:
                if not last_try:
                    continue  # a stale read is better the second time
                return self._null(
                    science, content_hash, split, Fault.CLUSTER, f"the accepted copy was changed after intake: {error}"
                )
            except ClusterTrouble:
                raise
            except RatingOverdue as error:
                log.exception("evaluation of %s failed", entry)
                problem, broke = str(error), "rating its answers came to no end"
                whole_split = True
                if overdue:
                    break
                overdue = True
            except Exception as error:
                log.exception("evaluation of %s failed", entry)
                problem, broke = f"{type(error).__name__}: {error}"[:500], "the engine failed on it"
                whole_split = False
                self.bench.drop_engine()
        self._check_base(science, split, problem, whole_split)
        return self._null(
            science,
            content_hash,
            split,
            Fault.ARTIFACT,
            f"{broke} twice, and works for the base model: {problem}",
        )

    def _offer_items(self, scored: Scored, items: Path, waiting_s: float | None) -> Evaluation:
        started = time.monotonic()
        digest = offer(items, scored.outcomes)
        timings = scored.evaluation.timings.model_copy(
            update={"commit_s": time.monotonic() - started, "waiting_s": waiting_s}
        )
        return scored.evaluation.model_copy(update={"items_sha256": digest, "timings": timings})

    def _check_base(self, science: Science, split: Split, problem: str, whole_split: bool = False) -> None:
        """Whether the base model can be scored here.

        Args:
            whole_split: not on a few items: what is too slow for many says nothing of four.

        Raises:
            ClusterTrouble: it can't.
        """
        try:
            with contained():
                self.bench.evaluate(
                    science,
                    self.bench.root.model(science.base_model),
                    science.base_model_content_hash,
                    split,
                    limit=None if whole_split else CHECK_ITEMS,
                )
        except Exception as error:
            late = overdue_s(error) > 0
            if not late:
                self.bench.drop_engine()
            raise ClusterTrouble(
                f"the base model can't be scored on this node either ({error}); first seen: {problem}",
                Fault.GRADER if late else Fault.CLUSTER,
            ) from error

    def _null(self, science: Science, content_hash: str, split: Split, fault: Fault, reason: str) -> Evaluation:
        identity = self.bench.identity
        return Evaluation(
            split=split,
            content_hash=content_hash,
            score=None,
            fault=fault,
            reason=reason,
            recipe_hash=science.recipe.hash(),
            engine_hash=None if identity is None else identity.digest(),
        )


@contextmanager
def _node_troubles() -> Iterator[None]:
    """Errors of the node, of the vault, the judge or the file system, say nothing about an artifact."""
    try:
        yield
    except AutorlError as error:
        raise ClusterTrouble(str(error), error.fault) from error
    except OSError as error:
        raise ClusterTrouble(f"{type(error).__name__}: {error}") from error

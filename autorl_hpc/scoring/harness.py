"""Tasks of other evaluation libraries: `inspect:NAME` and `lm-eval:NAME`. An extension (entry points of the group `autorl_hpc.harnesses`)
stages them as task folders; to grade, it runs the library on the items and asks the engine. Its answers hold the outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.task import Recipe
from autorl_hpc.rollouts.engine import Answer, ServingEngine
from autorl_hpc.scoring.outcome import UNREAD_SHARE, Context, ItemLike, JudgeFailed, Outcome

if TYPE_CHECKING:
    from autorl_hpc.files.layout import Root
    from autorl_hpc.tasks.heldout import StagedTask

OPTIONS: Mapping[str, Any] = {"harness_task": str, "harness_args": str, "harness_sha256": str, "harness_versions": str}
"""Recipe options of such a task: its name and arguments in the library, hash of its files in the vault, versions of the libraries."""


class Library(Protocol):
    """What an extension gives for one library. `version`: of the library and of the code that runs it."""

    @property
    def version(self) -> str: ...

    def stage(
        self,
        root: Root,
        asked: str,
        source: Path | None,
        settings: Mapping[str, str],
        *,
        again: bool,
        say: Callable[[str], None],
    ) -> StagedTask:
        """Run the task's own dataset loader once and install task folder, training rows and held-out items."""

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        recipe: Recipe,
        vault: Path,
        engine: ServingEngine,
        context: Context,
        *,
        order: Sequence[int] | None,
    ) -> tuple[list[Answer], list[list[int]]]:
        """Return an answer for each row, whose text is `encoded`, and the prompts that were asked."""


def library(kind: str) -> Library:
    """Return the extension for a library. Raises AutorlError: it is not installed."""
    for found in entry_points(group="autorl_hpc.harnesses"):
        if found.name == kind:
            loaded: Library = found.load()
            return loaded
    raise AutorlError(
        f"no extension runs {kind} tasks", next_step=f"pip install 'autorl-hpc[{kind}]'", exit_code=Exit.ENVIRONMENT
    )


def encoded(outcome: float | None, text: str, why: str = "", metrics: Mapping[str, float] | None = None) -> str:
    """Encode what the library found for one item. `outcome`: None if its judge or metric failed, and `why`."""
    value = {"outcome": outcome, "text": text, "why": why, "metrics": dict(metrics or {})}
    return json.dumps(value, sort_keys=True)


class Harnessed:
    """The scorer of a library's tasks: reads the outcomes in the answers."""

    kind = ""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    @property
    def version(self) -> str:
        return library(self.kind).version

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return the library's outcome of each item, without a value where it failed."""
        found = [json.loads(texts[0]) for texts in answers]
        self._metrics = {name: value for one in found for name, value in one["metrics"].items()}
        lost = [one["why"] for one in found if one["outcome"] is None]
        if len(lost) > UNREAD_SHARE * len(found):
            raise JudgeFailed(f"{len(lost)} of {len(found)} items have no score, the first: {lost[0]}")
        return [Outcome(one["outcome"]) for one in found]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return the task's own metrics, as the library computes them."""
        return self._metrics


class Inspect(Harnessed):
    """Of Inspect AI."""

    kind = "inspect"


class LmEval(Harnessed):
    """Of lm-evaluation-harness."""

    kind = "lm-eval"

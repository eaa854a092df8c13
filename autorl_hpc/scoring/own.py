"""Scorer `task`: the task folder's own `evaluate(question, model_answer, reference, **kw) -> float`, in child processes that
can't harm the grader. Its errors are the task's: the grader's fault with the item's id, never a score or the artifact's
fault."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.processes import ended_by
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.rollouts.child import Child, ChildFailed
from autorl_hpc.scoring.outcome import Context, Fact, ItemLike, Outcome
from autorl_hpc.scoring.own_child import POSITIONAL
from autorl_hpc.states import Fault
from autorl_hpc.tasks.folders import SCORER_SHA256, scorer_file, scorer_sha256

TIMEOUT_S = 10.0  # Limit of one call. Comparing texts takes microseconds, a parser or proof checker seconds.
START_LIMIT_S = 120.0  # Limit for importing the file, with Python and libraries cold on a busy shared file system
MEMORY_GIB = 8.0  # Address space, not memory in use: numpy's threads reserve a gigabyte and use a tenth of it
MAX_CHILDREN = 8
CALLS_A_CHILD = 32  # With fewer calls another process costs more than it saves; a start takes a tenth of a second


class EvaluateFailed(AutorlError):
    """The task's `evaluate` failed or returned something that is not a score."""


@dataclass(frozen=True)
class ChildLimits:
    """Limits of one child process."""

    call_s: float = TIMEOUT_S
    start_s: float = START_LIMIT_S
    memory_bytes: int = int(MEMORY_GIB * 1024**3)

    @classmethod
    def of(cls, options: Mapping[str, Fact]) -> ChildLimits:
        """Return the limits that a recipe's options set."""
        return cls(
            call_s=float(options.get("evaluate_timeout_s", TIMEOUT_S)),
            memory_bytes=int(float(options.get("evaluate_memory_gib", MEMORY_GIB)) * 1024**3),
        )


_Call = tuple[str, Mapping[str, Any]]  # An item's id, and the request


class OwnScorer:
    """The scorer of one task folder; the recipe's options say which of its files holds `evaluate`. `version` is the recipe's
    `scorer_version`, which the task's author raises with any change that can change a verdict."""

    def __init__(self, task: str, folder: Path, version: str) -> None:
        self.task, self.folder, self.version = task, folder, version

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return one outcome per item; of several samples the mean. Raises EvaluateFailed: a call raised, hung, or returned
        something other than a number from 0 to 1; AutorlError: the file is not the one pinned in the recipe."""
        file, pinned = scorer_file(self.folder, context.options), context.options.get(SCORER_SHA256)
        if pinned is not None and scorer_sha256(self.folder) != pinned:
            what = f"the scorer of task {self.task} is not the one that this run was launched with"
            advice = "put the task's folder back as it was, or launch under another name"
            raise AutorlError(what, where=self.folder, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.FAILED)
        calls = []
        for item, texts in zip(items, answers, strict=True):
            # Question and reference as in the row, because a task may store a table or a list there.
            row = {"id": item.id, "question": item.question, "answer": item.answer, **getattr(item, "raw", {})}
            named = {"id": row["id"], **{name: value for name, value in item.data.items() if name not in POSITIONAL}}
            calls += [
                (item.id, {"arguments": [row["question"], text, row["answer"]], "named": named}) for text in texts
            ]
        values = iter(self._run(file, calls, ChildLimits.of(context.options), _children(len(calls), context)))
        return [Outcome(sum(next(values) for _ in texts) / len(texts)) for texts in answers]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        return {}

    def longest_s(self, calls: int, context: Context) -> float:
        limits = ChildLimits.of(context.options)
        return limits.start_s + math.ceil(calls / _children(calls, context)) * limits.call_s

    def _run(self, file: Path, calls: Sequence[_Call], limits: ChildLimits, children: int) -> list[float]:
        """Return the value of each call. The first failure ends all; of several, the one with the lowest index is raised."""
        values, failures = [0.0] * len(calls), dict[int, Exception]()
        todo, lock = iter(range(len(calls))), threading.Lock()
        # No secrets, because the code reads a model's texts; no GPUs, because they belong to the engine.
        env = {**without_secrets(os.environ), "CUDA_VISIBLE_DEVICES": ""}
        first = {"file": str(file), "folder": str(file.parent), "memory_bytes": limits.memory_bytes}
        lanes = [
            Child("autorl_hpc.scoring.own_child", env, first, limits.start_s, limits.call_s) for _ in range(children)
        ]

        def work(lane: Child) -> None:
            try:
                while not failures:
                    with lock:
                        index = next(todo, None)
                    if index is None:
                        return
                    try:
                        answer = lane.call(calls[index][1])
                        if "error" in answer:
                            raise ChildFailed(answer["error"])
                        values[index] = float(answer["value"])
                    except Exception as error:
                        failures[index] = error
            finally:
                lane.end()

        def kill() -> None:
            for lane in lanes:
                lane.kill()

        # A child dies with the thread that started it, so each thread starts its own.
        threads = [threading.Thread(target=work, args=(lane,), name="evaluate", daemon=True) for lane in lanes]
        try:
            with ended_by(kill):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:  # a signal to the grader ends them during a call
            kill()
        if failures:
            index = min(failures)
            error = failures[index]
            if not isinstance(error, ChildFailed):
                raise error
            words = f"can't be used: {error}" if error.starting else str(error)
            raise self._failed(file, calls[index][0], words, limits)
        return values

    def _failed(self, file: Path, item: str, words: str, limits: ChildLimits) -> EvaluateFailed:
        advice = "correct it, try it with bin/check-task, and launch under another name; no score was given"
        if "MemoryError" in words:
            advice = f"it may use {limits.memory_bytes / 1024**3:g} GiB: raise `evaluate_memory_gib` in the recipe's `options`"
        elif "no answer within" in words:
            advice = (
                "let it give up by itself, or raise `evaluate_timeout_s` in the recipe's `options`; no score was given"
            )
        return EvaluateFailed(
            f"{file.name} of task {self.task}, item {item}: evaluate {words}; a score is a number from 0 to 1",
            where=file,
            fault=Fault.GRADER,
            next_step=advice,
            exit_code=Exit.FAILED,
        )


def _children(calls: int, context: Context) -> int:
    return max(1, min(context.workers, MAX_CHILDREN, calls // CALLS_A_CHILD))

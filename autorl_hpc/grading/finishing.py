"""What comes after an engine's answers, beside the next evaluations: rating and committing, some submissions at a time.

Programs that hang, and judges, take seconds in which a GPU has nothing to do with them. The claim is held until the score stands in
the ledger. A grader that dies before loses nothing: the claim is taken over, and the submission is scored anew.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from autorl_hpc.grading.patience import RATED_AT_ONCE
from autorl_hpc.records.ledger import Evaluation

ROOM = RATED_AT_ONCE - 1
"""Submissions beside the one that the grader's own thread may rate."""


@dataclass(frozen=True)
class Finished:
    """What came of it: the evaluation that was committed, or the error."""

    name: str
    generation: int
    result: Evaluation | Exception


class Finishing:
    """Room for submissions whose answers are there. All methods are for the grader's own thread."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._results: queue.SimpleQueue[Finished] = queue.SimpleQueue()

    @property
    def names(self) -> tuple[str, ...]:
        """The entries that are being finished, or are finished and not collected."""
        return tuple(self._names)

    @property
    def full(self) -> bool:
        """Whether one has to be collected before another one starts."""
        return len(self._names) >= ROOM

    def start(self, name: str, generation: int, work: Callable[[], Evaluation]) -> None:
        """Finishes an entry by `work`."""
        if self.full or name in self._names:
            raise RuntimeError(f"{', '.join(self._names)} are not collected yet")

        def finish() -> None:
            try:
                result: Evaluation | Exception = work()
            except Exception as error:
                result = error
            except BaseException as error:  # SystemExit, a panic of compiled code: it ends no grader
                result = RuntimeError(f"{type(error).__name__}: {error}")
                result.__cause__ = error
            self._results.put(Finished(name, generation, result))

        self._names.append(name)
        threading.Thread(target=finish, name="finishing", daemon=True).start()

    def collect(self, timeout_s: float | None = 0.0) -> Finished | None:
        """One that has been finished; None if none is, or not within `timeout_s` (None: waits for as long as it takes)."""
        if not self._names:
            return None
        try:
            found = self._results.get(timeout_s is None or timeout_s > 0.0, timeout_s or None)
        except queue.Empty:
            return None
        self._names.remove(found.name)
        return found

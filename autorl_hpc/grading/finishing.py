"""What comes after an engine's answers, beside the next evaluation: rating and committing, one submission at a time and in order.

The claim is held until the score stands in the ledger. A grader that dies before loses nothing: the claim is taken over, and the
submission is scored anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from autorl_hpc.records.ledger import Evaluation


@dataclass(frozen=True)
class Finished:
    """What came of it: the evaluation that was committed, or the error."""

    name: str
    generation: int
    result: Evaluation | Exception


class Finishing:
    """Room for one submission whose answers are there. All methods are for the grader's own thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._name: str | None = None
        self._results: list[Finished] = []

    @property
    def name(self) -> str | None:
        """The entry that is being finished, or is finished and not collected."""
        return self._name

    def start(self, name: str, generation: int, work: Callable[[], Evaluation]) -> None:
        """Finishes an entry by `work`. The one before it must have been collected."""
        if self._name is not None:
            raise RuntimeError(f"{self._name} is not collected yet")

        def finish() -> None:
            try:
                result: Evaluation | Exception = work()
            except Exception as error:
                result = error
            except BaseException as error:  # SystemExit, a panic of compiled code: it ends no grader
                result = RuntimeError(f"{type(error).__name__}: {error}")
                result.__cause__ = error
            self._results.append(Finished(name, generation, result))

        self._name = name
        self._thread = threading.Thread(target=finish, name="finishing", daemon=True)
        self._thread.start()

    def collect(self, timeout_s: float | None = 0.0) -> Finished | None:
        """What has been finished; None if nothing is, or not within `timeout_s` (None: waits for as long as it takes)."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        self._thread, self._name = None, None
        return self._results.pop()

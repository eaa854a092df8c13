"""The logged steps that were written, each once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from autorl_hpc.files.agent_log import lines
from autorl_hpc.recorder.steps import Step
from autorl_hpc.recorder.watch import Lines, Moment
from autorl_hpc.records.recorded import TrainingPoint

MAX_BYTES = 64 * 2**20
"""Some hundred thousand steps."""


class Points:
    """Appends points to a file; a step with the same figures, to four digits, is the same step, whoever tells it.

    So a second training that gives the very same figures is not seen as a second one.
    """

    def __init__(self, path: Path) -> None:
        self._known: set[bytes] = set()
        for line in lines(path, max_bytes=MAX_BYTES, max_line_bytes=64 * 1024):
            try:
                self._known.add(_digest(_step(TrainingPoint.model_validate_json(line.text))))
            except ValidationError:
                continue  # cut by a crash, or by a bound
        self._lines = Lines(path, MAX_BYTES)
        self.left_out = 0

    def add(self, step: Step, source: str, now: Moment) -> None:
        """Writes a step if it is new."""
        digest = _digest(step)
        if digest in self._known:
            return
        if self._lines.full:
            self.left_out += 1
            return
        self._known.add(digest)
        self._lines.add(TrainingPoint.model_validate({**now.told(), "source": source, **step.fields()}))

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def _digest(step: Step) -> bytes:
    return hashlib.blake2b(step.signature().encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _step(point: TrainingPoint) -> Step:
    """The step that a point tells, by the fields' own names."""
    named = {
        name: getattr(point, name) for name in ("step", "epoch", "loss", "reward", "kl", "learning_rate", "grad_norm")
    }
    figures = {name: float(value) for name, value in named.items() if value is not None}
    return Step({**figures, **point.more}, point.not_finite)

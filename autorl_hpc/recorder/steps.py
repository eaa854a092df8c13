"""Finds logged steps of trainers in text: flat dictionaries as Python or JSON writes them, wherever they stand.

transformers 5 prints `{'loss': '0.3461', ..., 'epoch': '0.0625'}` (four digits, as text), transformers 4 numbers. They also come
inside an agent's own trace, as a tool's output in JSON, and behind progress bars. Nothing is evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autorl_hpc.files.agent_log import without_escapes
from autorl_hpc.recorder.trainers import FIELDS, trainer_of

MAX_FIGURES = 120
"""In one step; trl's largest has 26, and more with many reward functions."""

MAX_NAME_CHARS = 100
MAX_STEP = 2**53
HINTS = (b"loss", b"reward")
"""Without one of these in it, text has no step."""

_DICT = re.compile(r"\{[^{}]{8,12288}\}")
_PAIR = re.compile(
    r"\s{0,8}(?:'([^'\"\\]{1,200})'|\"([^'\"\\]{1,200})\")\s{0,8}:\s{0,8}"
    r"(?:'([^'\\]{0,400})'|\"([^\"\\]{0,400})\"|([^\s,'\"\[\]()]{1,64})|(\[[^\[\]]{0,2000}\]))\s{0,8}(,|$)"
)
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_PROGRESS = {*FIELDS["step"], *FIELDS["epoch"], *FIELDS["learning_rate"], *FIELDS["grad_norm"], "train_runtime"}
"""One of these stands beside a loss or a reward in a trainer's log, and not in any dictionary that has one."""


@dataclass(frozen=True)
class Step:
    """Figures of one logged step, by the trainer's names.

    Attributes:
        not_finite: names of figures that were NaN or infinite.
    """

    figures: dict[str, float]
    not_finite: tuple[str, ...] = ()

    def fields(self) -> dict[str, object]:
        """As fields of TrainingPoint."""
        rest = dict(self.figures)
        found: dict[str, object] = {}
        for field, known in FIELDS.items():
            name = next((name for name in known if name in rest), None)
            if name is not None and not (field == "step" and not _is_step(rest[name])):
                value = rest.pop(name)
                found[field] = int(value) if field == "step" else value
        trainer = trainer_of([*self.figures, *self.not_finite])
        return {**found, "trainer": trainer, "more": rest, "not_finite": self.not_finite}

    def signature(self) -> str:
        """The same for a step as printed (four digits, an epoch and no step) and as kept in trainer_state.json."""
        fields = self.fields()
        more = fields.pop("more")
        assert isinstance(more, dict)
        kept = {**{name: value for name, value in fields.items() if name in FIELDS}, **more}
        kept.update(dict.fromkeys(self.not_finite, math.nan))
        twice = {"total_flos", *(("step",) if "epoch" in kept else ())}
        return ";".join(f"{name}={kept[name]:.4g}" for name in sorted(kept) if name not in twice)


def steps_in(text: str) -> Iterator[Step]:
    """The steps in some text, in its order."""
    for found in _DICT.finditer(without_escapes(text)):
        inner = found[0][1:-1]
        if "loss" in inner or "reward" in inner:
            step = step_of(_pairs(inner.replace('\\"', '"') if '\\"' in inner else inner))
            if step is not None:
                yield step


def step_of(values: Mapping[str, object]) -> Step | None:
    """The step that a trainer logged as `values`; None if this is no trainer's log."""
    figures: dict[str, float] = {}
    strange: list[str] = []
    for name, value in values.items():
        number = number_of(value)
        if number is None or not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS:
            continue
        if len(figures) + len(strange) >= MAX_FIGURES:
            break
        if math.isfinite(number):
            figures[name] = number
        else:
            strange.append(name)
    named = figures.keys() | set(strange)
    if named & _PROGRESS and any("loss" in name or "reward" in name for name in named):
        return Step(figures, tuple(strange))
    return None


def number_of(value: object) -> float | None:
    """A number, or a text that is one, NaN and infinity among them; None for all else, truth values too."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and (_NUMBER.fullmatch(value) or _NOT_FINITE.fullmatch(value)):
        return float(value)
    return None


def _pairs(inner: str) -> dict[str, object]:
    """Names and values of a flat dictionary; empty if it is anything else."""
    found: dict[str, object] = {}
    at = 0
    while at < len(inner):
        pair = _PAIR.match(inner, at)
        if pair is None or len(found) > MAX_FIGURES:
            return {} if pair is None and inner[at:].strip() else found
        name, values = pair[1] or pair[2], (pair[3], pair[4], pair[5])
        found[name] = next((value for value in values if value is not None), None)
        at = pair.end()
    return found


def _is_step(value: float) -> bool:
    return value.is_integer() and 0 <= value < MAX_STEP

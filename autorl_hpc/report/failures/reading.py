"""Signs of trouble in training points, logs and exits: each with the lines that it rests on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.failures.facts import Exit, LogExcerpt
from autorl_hpc.report.story import EvidenceLine
from autorl_hpc.report.text import clean

MAX_LOG_CHARS = 400_000
"""Of all excerpts together: their ends are read, where a traceback stands."""

MAX_LINE_CHARS = 2_000
MAX_EVIDENCE = 5
"""Lines that a finding shows."""

_ERROR = re.compile(
    r"^\s*(?:\[[\w: ]{1,20}\]:?\s*)?([A-Za-z_][\w.]{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Warning))\b:?\s?(.{0,300})"
)
_ROLLOUT_FRAME = re.compile(
    r"rollout|generat|vllm|\benv|environment|episode|sampl|reward|tool|playout|completion|parse", re.I
)
_ROLLOUT_WORDS = re.compile(
    r"(?:rollout|episode|environment|env|tool call|generation|completion|answer)s?\b.{0,60}\b(?:fail|error|crash|timed? ?out|empty|could not|unable)"
    r"|(?:fail|could not|unable)\w*\b.{0,40}\b(?:parse|extract|roll ?out|step the env|reset the env|generat)"
    r"|(?:no|0|zero)\s+(?:valid\s+)?(?:completions|rollouts|answers|responses|episodes)\b"
    r"|(?:all|every)\s+(?:completions|rollouts|rewards|responses)\b.{0,30}\b(?:empty|identical|zero|same)",
    re.I,
)
_DATA_WORDS = re.compile(
    r"(?:dataset|train(?:ing)? (?:set|data|examples))\b.{0,40}\b(?:is empty|has no|0 (?:rows|examples|samples))"
    r"|num_samples should be a positive integer value, but got num_samples=0"
    r"|num examples = 0\b|column names? .{0,60}(?:not in|missing|don't match)|keyerror: ['\"](?:prompt|text|messages|question|answer|chosen|rejected|completion|labels)['\"]"
    r"|mismatch between .{0,40}tokeniz|chat_template is not set",
    re.I,
)


_NAN = re.compile(
    r"\b(?:loss|grad_norm|kl)['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?:tensor\()?[-+]?(?:nan|inf(?:inity)?)\b", re.I
)


class Line(NamedTuple):
    """One line of a log."""

    where: str
    text: str


def lines(logs: Sequence[LogExcerpt]) -> Iterator[Line]:
    """Lines of log excerpts with the byte at which each begins."""
    left = MAX_LOG_CHARS
    for log in logs:
        text = log.text[-left:] if left else ""
        left -= len(text)
        offset = log.offset + len(log.text[: len(log.text) - len(text)].encode("utf-8", "replace"))
        for line in text.split("\n"):
            yield Line(f"{clean(log.source, 150)}, byte {offset}", line[:MAX_LINE_CHARS])
            offset += len(line.encode("utf-8", "replace")) + 1


class Trace(NamedTuple):
    """One Python traceback."""

    where: str
    error: str
    """The last line: class and message."""
    in_rollout: bool
    """A frame of it is in code for rollouts, environments, rewards or sampling."""


def tracebacks(known: Sequence[Line]) -> list[Trace]:
    """Tracebacks, in their order; one that ends nowhere is none."""
    found: list[Trace] = []
    begun: Line | None = None
    frames: list[str] = []
    for line in known:
        if "Traceback (most recent call last)" in line.text:
            begun, frames = line, []
        elif begun is not None:
            if line.text.lstrip().startswith("File ") or line.text.startswith("    "):
                frames.append(line.text)
            elif (match := _ERROR.match(line.text)) is not None:
                last = frames[-6:]
                in_rollout = any(_is_of_rollout(frame) for frame in last)
                found.append(Trace(begun.where, f"{match[1]}: {match[2]}".strip(": "), in_rollout))
                begun = None
            elif len(frames) > 400:
                begun = None
    return found


def _is_of_rollout(frame: str) -> bool:
    """By the function's and the file's own name, not by the folders around it."""
    match = re.match(r'\s*File "([^"]{0,500})", line \d+, in (.{1,100})', frame)
    if match is None:
        return False
    return _ROLLOUT_FRAME.search(match[1].rsplit("/", 1)[-1]) is not None or _ROLLOUT_FRAME.search(match[2]) is not None


def told_of_rollouts(known: Iterable[Line]) -> list[Line]:
    """Lines that complain of rollouts, environments or answers that could not be parsed."""
    return [line for line in known if _ROLLOUT_WORDS.search(line.text)]


def told_of_nan(known: Iterable[Line]) -> list[Line]:
    """Lines that log a loss that is no finite number."""
    return [line for line in known if _NAN.search(line.text)]


def told_of_data(known: Iterable[Line]) -> list[Line]:
    """Lines that complain of an empty data set or one of the wrong format."""
    return [line for line in known if _DATA_WORDS.search(line.text)]


def evidence(found: Iterable[Line | Trace]) -> tuple[EvidenceLine, ...]:
    """The first few as lines to show."""
    shown = []
    for each in found:
        text = each.text if isinstance(each, Line) else each.error
        shown.append(EvidenceLine(where=each.where, says=clean(text, 200) or ""))
        if len(shown) >= MAX_EVIDENCE:
            break
    return tuple(shown)


def broken_exits(exits: Sequence[Exit]) -> list[Exit]:
    """Ends of training programs that were no success: of Python, launchers and trainers; a signal of the user's own counts."""
    return [
        e
        for e in exits
        if e.exit_code not in (0, None)
        and re.search(r"python|torchrun|accelerate|deepspeed|trl|llamafactory|axolotl|\.sh\b", e.command)
    ]


def exit_line(each: Exit) -> EvidenceLine:
    """How a program ended."""
    code = each.exit_code or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return EvidenceLine(where=f"process at {each.elapsed_s:.0f} s", says=f"{how}: {clean(each.command, 150)}")


def point_line(point: TrainingPoint, says: str) -> EvidenceLine:
    """One training point."""
    step = f", step {point.step}" if point.step is not None else ""
    return EvidenceLine(where=f"{clean(point.source, 150)}{step}, {point.elapsed_s:.0f} s", says=says)

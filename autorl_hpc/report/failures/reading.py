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
MAX_TRACE_CHARS = 8_000
"""Of a traceback in a line of JSON."""
MAX_FRAME_LINES = 18
"""The last frames of a traceback, each with its source line and marks: the error is theirs."""
MAX_EVIDENCE = 5
"""Lines that a finding shows."""

_PREFIX = r"(?:\[[\w: ]{1,20}\]:?\s)?"
"""Of a launcher, before each line: `[rank0]:`."""
_ERROR = re.compile(rf"^\s*{_PREFIX}\s*([A-Za-z_][\w.]{{0,80}})(?::\s?(.{{0,300}})|\s*$)")
_RAISED = re.compile(rf"^{_PREFIX}[\w.]{{0,80}}(?:Error|Exception): ")
_FRAME = re.compile(rf'^{_PREFIX}\s+File "([^"]{{0,500}})", line \d+, in (.{{1,100}})')
_INDENTED = re.compile(rf"^{_PREFIX}\s+\S")
_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|\.?venv|(?:mini|ana)?conda\d?)/|/lib(?:64)?/python\d|^/usr/(?:local/)?lib|^<frozen"
)
"""Folders of installed packages and of Python itself: a frame there says what a library was doing, and not the agent's code."""
_ROLLOUT_FRAME = re.compile(
    r"rollout|generat|vllm|(?:^|_)env|environment|episode|sampl(?!er)|reward|tool|playout|completion|parse(?!_?arg|_?conf|_?cli|_?opt|r)",
    re.I,
)
_ROLLOUT_WORDS = re.compile(
    r"(?:rollout|episode|tool call|generation|completion|answer|environment (?:step|reset|worker)|env (?:step|reset|worker))s?\b.{0,60}\b(?:fail|error|crash|timed? ?out|empty|could not|unable)"
    r"|(?:fail|could not|unable)\w*\b.{0,40}\b(?:parse|extract|roll ?out|step the env|reset the env|generat)"
    r"|(?:no|0|zero)\s+(?:valid\s+)?(?:completions|rollouts|answers|responses|episodes)\b"
    r"|(?:all|every)\s+(?:completions|rollouts|rewards|responses)\b.{0,30}\b(?:empty|identical|zero|same)",
    re.I,
)
_PROSE = re.compile(
    r"\b(?:may|might|would|should|maybe|perhaps|if|I|I'll|I'm|let me|let's|we|could(?! not)|can(?! ?not)|will)\b"
)
"""Words of somebody who thinks aloud: what may fail has not failed. Programs that log don't use them."""
_OF_TRACE = re.compile(r"^\s*(?:\{\s*\"|\"[\w.-]{1,40}\"\s*:)")
"""A line of JSON: of an agent's trace. What it quotes is code, a file or a thought as likely as a log."""
_OF_CODE = re.compile(r"\b(?:assert|raise|return|print\(|isnan|isfinite|isinf|def|elif)\b|^\s*#|print\(|\bf['\"]")
_ESCAPED = re.compile(r"Traceback \(most recent call last\):(\\+)n")
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
    is_log: bool = True
    """False: of a trace, or cut out for its traceback; only tracebacks are read of it."""


def lines(logs: Sequence[LogExcerpt]) -> Iterator[Line]:
    """Lines of log excerpts with the byte at which each begins. A traceback inside a line of JSON is several lines."""
    left = MAX_LOG_CHARS
    for log in logs:
        text = log.text[-left:] if left else ""
        left -= len(text)
        offset = log.offset + len(log.text[: len(log.text) - len(text)].encode("utf-8", "replace"))
        for line in text.split("\n"):
            where = f"{clean(log.source, 150)}, byte {offset}"
            escaped = _ESCAPED.search(line)
            if escaped is not None:
                for inner in _unescaped(line[escaped.start() : escaped.start() + MAX_TRACE_CHARS], escaped[1]):
                    yield Line(where, inner[:MAX_LINE_CHARS], False)
            else:
                is_log = not log.only_tracebacks and _OF_TRACE.match(line) is None
                yield Line(where, line[:MAX_LINE_CHARS], is_log)
            offset += len(line.encode("utf-8", "replace")) + 1


def _unescaped(text: str, slashes: str) -> list[str]:
    """Lines of a text that stands as a JSON string, or as one inside another: as many backslashes before each `n`."""
    found = []
    for line in text.split(slashes + "n"):
        whole, end, _ = line.replace(slashes + '\\"', "\1").replace(slashes + '"', "\1").partition('"')
        found.append(whole.replace("\1", '"'))
        if end:
            break
    return found


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
            if _INDENTED.match(line.text) or not line.text.strip():
                frames.append(line.text)
            elif (match := _ERROR.match(line.text)) is not None:
                last = frames[-MAX_FRAME_LINES:]
                in_rollout = any(_is_of_rollout(frame) for frame in last)
                found.append(Trace(begun.where, f"{match[1]}: {match[2] or ''}".strip(": "), in_rollout))
                begun = None
            if begun is not None and not line.is_log and line.text.endswith("…"):  # a trace tells the beginning of it
                in_rollout = any(_is_of_rollout(frame) for frame in frames)
                found.append(Trace(begun.where, f"a traceback, cut: {line.text.strip()}", in_rollout))
                begun = None
            if len(frames) > 400:
                begun = None
    return found


def _is_of_rollout(frame: str) -> bool:
    """By the function's and the file's own name, not by the folders around it; frames of installed code tell nothing."""
    match = _FRAME.match(frame)
    if match is None or _INSTALLED.search(match[1]) is not None:
        return False
    if match[2].strip() != "<module>" and _ROLLOUT_FRAME.search(match[2]) is not None:
        return True
    return _ROLLOUT_FRAME.search(match[1].rsplit("/", 1)[-1]) is not None


def told_of_rollouts(known: Iterable[Line]) -> list[Line]:
    """Lines that complain of rollouts, environments or answers that could not be parsed."""
    return [line for line in known if _ROLLOUT_WORDS.search(line.text) and _is_said(line)]


def told_of_nan(known: Iterable[Line]) -> list[Line]:
    """Lines that log a loss that is no finite number; a line of code that was printed logs nothing."""
    return [line for line in known if line.is_log and _NAN.search(line.text) and not _OF_CODE.search(line.text)]


def told_of_data(known: Iterable[Line]) -> list[Line]:
    """Lines that complain of an empty data set or one of the wrong format; the last line of a traceback is one."""
    return [line for line in known if _DATA_WORDS.search(line.text) and (_RAISED.match(line.text) or _is_said(line))]


def _is_said(line: Line) -> bool:
    """Whether a program logged it, as far as its words tell."""
    return line.is_log and _PROSE.search(line.text) is None


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
        if (e.exit_code not in (0, None) or (e.exit_code is None and e.ok is False))
        and re.search(r"python|torchrun|accelerate|deepspeed|trl|llamafactory|axolotl|\.sh\b", e.command)
    ]


def exit_line(each: Exit) -> EvidenceLine:
    """How a program ended."""
    code = each.exit_code or 0
    how = f"signal {-code}" if code < 0 else "failed" if each.exit_code is None else f"exit code {code}"
    return EvidenceLine(where=f"process at {each.elapsed_s:.0f} s", says=f"{how}: {clean(each.command, 150)}")


def point_line(point: TrainingPoint, says: str) -> EvidenceLine:
    """One training point."""
    step = f", step {point.step}" if point.step is not None else ""
    return EvidenceLine(where=f"{clean(point.source, 150)}{step}, {point.elapsed_s:.0f} s", says=says)

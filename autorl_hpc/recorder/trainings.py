"""Follow the training logs of trainers' libraries and of own loops (`STYLES`), and the times of the agent's output.

Read are the agent's output; log files in the workspace, found by name; and what the observer saw logged (`observed.py`). A step
found in several of them is written once.
"""

from __future__ import annotations

import ast
import hashlib
import io
import math
import os
import re
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import cut
from autorl_hpc.files.safe_open import open_plain, without_escapes
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import GrowingFile, LineWriter, Moment, Parts, open_files
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TrainingPoint

# --- which trainer logged a step, by the names of its figures. Checked by running each trainer of trl 1.16.0 and transformers 5.24.0
# (tests/unit/recorded_logs); PPO by the names of trl 0.12 to 0.29, ORPO and CPO by their code. Names don't distinguish RLOO from GRPO.

# fields of TrainingPoint and the names that trainers use for them; the first name found counts
FIELDS: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "training/global_step", "iteration", "iter", "steps", "it", "update"),
    "epoch": ("epoch", "ep"),
    "loss": (
        *("loss", "loss/policy_avg", "policy_loss", "train_loss_step", "actor/pg_loss", "train/loss", "training loss"),
        *("train_loss", "act_loss", "gpt_loss", "pg_loss"),
    ),
    "reward": (
        *("reward", "objective/scores", "mean_reward", "rewards/mean", "train_reward", "critic/score/mean"),
        *("critic/rewards/mean", "rlhf_reward", "reward_mean", "avg_reward"),
    ),
    "kl": (
        *("kl", "objective/kl", "approx_kl", "policy/approxkl_avg", "mean_kl", "kl_divergence", "actor/ppo_kl"),
        "actor/kl_loss",
    ),
    "learning_rate": ("learning_rate", "lr", "actor_lr", "actor/lr", "train/lr", "act_lr"),
    "grad_norm": ("grad_norm", "gradient_norm", "actor/grad_norm", "train/grad_norm", "actor_grad_norm"),
}

# names that must all be there, a beginning that some name must have, and the trainer; the first match counts
TRAINERS: tuple[tuple[str, str, str], ...] = (
    ("log_odds_ratio nll_loss rewards/chosen", "", "ORPOTrainer"),
    ("nll_loss rewards/chosen", "", "CPOTrainer"),
    ("rewards/chosen", "objective/", "OnlineDPOTrainer"),
    ("rewards/chosen rewards/accuracies", "", "DPOTrainer"),
    ("rewards/chosen kl", "", "KTOTrainer"),
    ("policy_loss value_loss", "", "PPOTrainer"),
    ("objective/kl", "", "PPOTrainer"),
    ("reward", "completions/", "GRPOTrainer"),
    ("mean_reward margin", "", "RewardTrainer"),
    ("mean_token_accuracy", "", "SFTTrainer"),
    ("loss grad_norm", "", "Trainer"),
    ("loss learning_rate", "", "Trainer"),
)

SAME = {
    **dict.fromkeys(("loss/policy_avg", "actor_loss", "pg_loss", "actor/pg_loss", "act_loss"), "policy_loss"),
    **dict.fromkeys(("loss/value_avg", "critic_loss", "vf_loss", "critic/vf_loss"), "value_loss"),
}


def of_evaluation(name: str) -> bool:
    """Return whether a figure of this name is an evaluation's: it says nothing of the training."""
    return re.search(rf"(?<![a-z]){_EVALUATION}(?![a-z])", name, re.I) is not None


def trainer_of(figures: Collection[str]) -> str | None:
    """Return the trainer that logs figures of these names; None if they don't show it. The prefix `eval_` is ignored."""
    names = {name.removeprefix("eval_") for name in figures}
    names |= {SAME[name] for name in names if name in SAME}
    for wanted, beginning, trainer in TRAINERS:
        if names.issuperset(wanted.split()) and any(name.startswith(beginning) for name in names):
            return trainer
    return None


# --- logged steps in text: dictionaries as Python or JSON writes them (also one in another), and lines of names and numbers
# (`STYLES`), anywhere in the text, as in an agent's own trace. Nothing is evaluated. tests/unit/recorded_logs has samples.

MAX_FIGURES = 120  # limit for one step; trl's largest has 26, and more with many reward functions
MAX_NAME_CHARS = 100
MAX_STEP = 2**53
HINTS = (b"loss", b"reward", b"Loss", b"Reward", b"LOSS")  # text without any of these has no step
_DICT = re.compile(r"\{(?:[^{}()]|\{[^{}()]{1,4096}\}){8,12288}\}")
_OPENRLHF = re.compile(r"Global step (\d{1,12}): \{")  # it prints a step's number before its dictionary
_ROWS = re.compile(r"(<td>\d+</td>)(?:\\n|\W){1,40}(?=<td>)")  # A notebook's row of step and loss is on several lines
# As Python's repr and JSON write what is no literal.
_BARE = re.compile(r"(?<=[:\s])-?(?:nan|inf|null)\b", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_EVALUATION = r"(?:eval(?:uation)?|val(?:id(?:ation)?)?|test|dev)"
EVALUATED = re.compile(
    rf"\W*(?:\[[^\]]{{0,40}}\]\W*)?{_EVALUATION}(?:ing)?\b", re.I
)  # begins a line about an evaluation
_NAME = rf"(?P<name>(?:(?:{_EVALUATION}|best|min)[ -])?"
_VALUE = r"(?P<value>[+-]?(?:\d{1,40}(?:\.\d{0,40})?(?:e[+-]?\d{1,4})?|nan|inf))(?![\w.]*[A-Za-z_(])"

# Lines of names and numbers; the first style that a line has counts. A notebook's table has the training loss without a name.
STYLES: tuple[tuple[str, str, str], ...] = (
    # (style, what a line has, with its step or epoch if these have no names; names and numbers in it)
    ("torchtune's bar", r"(?P<epoch>\d+)\|(?P<step>\d+)\|loss: ", r"\|(?P<name>loss): " + _VALUE),
    ("verl", r"\bstep:(?P<step>\d+) - ", r" - (?P<name>[\w/@.-]+):" + _VALUE),
    ("progress bar", r" (?P<step>\d+)/(?:\d+|\?) \[[^\]]*, \w+=", r"[ ,](?P<name>[\w/]+)=" + _VALUE),
    ("notebook", r"<td>(?P<step>\d+)</td>\W*<td>[\d.]+</td>", r"(?P<name>)</td>\W*<td>" + _VALUE),
    (
        "own print, torchtune",
        r"\b(?:steps?|iter|iteration|epoch|ep|update|global_step)\b\W{0,4}\d",
        _NAME + r"[a-z][\w/@.-]{0,60})[\]')\"]{0,2}(?:\s{0,6}[:=]\s{0,6}|\s{1,6})[\[(]?" + _VALUE,
    ),
)

_STYLES = tuple((re.compile(line, re.I), re.compile(pair, re.I)) for _, line, pair in STYLES)
MAX_LINE_CHARS = 20_000
# A trainer's log has one of these beside a loss or a reward; other dictionaries with a loss often don't.
_PROGRESS = {*FIELDS["step"], *FIELDS["epoch"], *FIELDS["learning_rate"], *FIELDS["grad_norm"], "train_runtime"}


@dataclass(frozen=True)
class LoggedStep:
    """Figures of one logged step, by the trainer's names; `not_finite` names those that were NaN or infinite."""

    figures: dict[str, float]
    not_finite: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        rest = dict(self.figures)
        found: dict[str, Any] = {}
        summary = {"train_loss"} if "train_runtime" in rest else set()  # the mean over a training, at its end
        for title, names in FIELDS.items():
            name = next((name for name in names if name in rest and name not in summary), None)
            if name is not None and title != "step":
                found[title] = rest.pop(name)
            elif name is not None and rest[name].is_integer() and 0 <= rest[name] < MAX_STEP:
                found[title] = int(rest.pop(name))
        trainer = trainer_of([*self.figures, *self.not_finite])
        return {**found, "trainer": trainer, "more": rest, "not_finite": self.not_finite}

    def digest(self) -> bytes:
        """Return a hash that is the same for a step as printed (four digits, an epoch, no step) and as observed."""
        fields = self.fields()
        kept = {name: fields[name] for name in FIELDS if name in fields}
        kept |= fields["more"] | dict.fromkeys(self.not_finite, math.nan)
        twice = {"total_flos", *(("step",) if "epoch" in kept else ())}
        text = ";".join(f"{name}={kept[name]:.4g}" for name in sorted(kept) if name not in twice)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def steps_in(text: str) -> Iterator[LoggedStep]:
    """Yield the steps in a text, in order: those of a line's dictionaries, else its names and numbers."""
    for line in re.split(r"\\[nr]|[\n\r]", _ROWS.sub(r"\1", without_escapes(text))):
        lowered = line[:MAX_LINE_CHARS].lower()
        if "loss" not in lowered and "reward" not in lowered and "<td>" not in lowered:
            continue
        head = {"step": number[1]} if (number := _OPENRLHF.search(line)) is not None else {}
        found = [step for each in _DICT.finditer(line) if (step := step_of({**head, **_flat(each[0])})) is not None]
        step = None if found else _by_style(line[:MAX_LINE_CHARS])
        yield from found if step is None else [step]


def _by_style(line: str) -> LoggedStep | None:
    for pattern, pair in _STYLES:
        if (head := pattern.search(line)) is not None:
            begins = "eval_" if EVALUATED.match(line) else ""
            named: dict[str, str] = {}
            for found in pair.finditer(line):
                name = found["name"].lower().replace(" ", "_") or "training loss"
                named[begins * ("loss" in name or "reward" in name) + name] = found["value"]
            step = step_of({**head.groupdict(), **named})
            if step is not None and any("loss" in n or "reward" in n for n, v in named.items() if not v.isdigit()):
                return step
    return None


def _flat(text: str) -> dict[object, object]:
    """Return a dictionary in a text, what is in an inner one at its own names."""
    found: dict[object, object] = {}
    try:
        literal = ast.literal_eval(_BARE.sub(r"'\g<0>'", text.replace('\\"', '"')))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return found
    for name, value in literal.items() if isinstance(literal, dict) else ():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def step_of(values: Mapping[Any, object]) -> LoggedStep | None:
    """Return the step that a trainer logged as `values`; None if they are not a trainer's."""
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
        return LoggedStep(figures, tuple(strange))
    return None


def number_of(value: object) -> float | None:
    """Return a number, also from a text, including NaN and infinity; None for anything else, including booleans."""
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


MAX_BYTES = 64 * 2**20  # holds some hundred thousand steps


class Points:
    """Appends points to a file, in any thread. Steps with the same figures, to four digits, count as the same step, whatever
    their source, so a second training with identical figures is not recorded."""

    def __init__(self, path: Path) -> None:
        self.left_out = 0
        self._path, self._lines, self._lock = path, LineWriter(path, MAX_BYTES), threading.Lock()
        self._known: set[bytes] | None = None

    def add(self, step: LoggedStep, source: str, now: Moment) -> None:
        """Write a step if it is new."""
        digest = step.digest()
        with self._lock:
            if self._known is None:
                self._known = set(self._written())
            if digest in self._known:
                return
            if self._lines.full:
                self.left_out += 1
                return
            self._known.add(digest)
            self._lines.add(TrainingPoint.model_validate({**now.fields(), "source": source, **step.fields()}))

    def _written(self) -> Iterator[bytes]:
        fd = open_plain(self._path)
        with os.fdopen(fd, "rb") if fd is not None else io.BytesIO() as file:
            for line in file:
                try:
                    point = TrainingPoint.model_validate_json(line)
                except ValidationError:
                    continue  # cut by a crash or a limit
                figures = {name: float(value) for name in FIELDS if (value := getattr(point, name)) is not None}
                yield LoggedStep({**figures, **point.more}, point.not_finite).digest()

    def close(self) -> None:
        with self._lock:
            self._lines.close()


# --- the watch. Logs may be cut, replaced or 50 GB long, and are opened anew for each look, because an agent may remove them.

PIECE_BYTES = 1 << 20  # size of one read, and of the longest line
MAX_BEHIND_BYTES = 64 * 2**20
# If reading is more than MAX_BEHIND_BYTES behind, it continues this far from the end; the bytes between are never read.
RESUME_BEHIND_BYTES = 8 * 2**20
LOOK_S = 2.0
SLICE_S = 0.02  # 1 % of a core while logs grow faster than they are read; otherwise much less
CLOSE_S = 2.0  # limit for reading the rest after the agent's end
MAX_FILES = 10_000
LOG_ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".ndjson", ".ipynb")
SKIPPED_AT_TOP = {"data", "models", "submissions", "results", ".git", ".agent", ".observed"}
# Folders in which no training writes logs.
SKIPPED = {".git", "site-packages", "node_modules", "__pycache__", ".venv", "venv", "dist-packages", ".cache"}


def is_log(parts: Parts) -> bool:
    name = parts[-1]
    if parts[0] in SKIPPED_AT_TOP or not SKIPPED.isdisjoint(parts):
        return False
    return name.startswith(("nohup", "stdout", "stderr")) or name.endswith(LOG_ENDINGS)


class Trainings:
    """Writes a `TrainingPoint` for each step that a trainer logged; `sweep` finds the logs in its workspace. `slice_s`, `close_s`:
    limits of a look, and of reading after the agent's end."""

    every_s = LOOK_S

    def __init__(
        self,
        agent_log: Path,
        sweep: Sweep,
        points: Points,
        events: Path,
        slice_s: float = SLICE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self.agent_log, self.sweep, self.points = agent_log, sweep, points
        self._events, self._slice_s, self._close_s = events, slice_s, close_s
        self._output = GrowingFile()
        self._seen: dict[Parts, tuple[int, ...]] = {}
        self._logs: defaultdict[Parts, GrowingFile] = defaultdict(GrowingFile)
        self._due: dict[Parts, None] = {}
        self._left_out = 0
        sweep.visitors.append(self.found)

    def found(self, parts: Parts, status: os.stat_result) -> None:
        """Take a file of the workspace from the walk. Called in the walk's thread."""
        if status.st_size and stat.S_ISREG(status.st_mode) and is_log(parts):
            identity = status.st_ino, status.st_size, status.st_mtime_ns
            if self._seen.get(parts) != identity and (parts in self._seen or len(self._seen) < MAX_FILES):
                self._seen[parts] = identity
                self._due[parts] = None

    def look(self, now: Moment) -> None:
        self._read_all(now, time.monotonic() + self._slice_s)

    def close(self, now: Moment) -> None:
        """Search logs a last time and read the rest, including last lines without an end, for `close_s` at most."""
        deadline = time.monotonic() + self._close_s
        try:
            self.sweep.show(self.found, time.monotonic() + self._close_s / 3)
            self._due |= dict.fromkeys(self._logs)  # a last line without an end was left
            self._read_all(now, deadline, last=True)
        finally:
            self.points.close()
            left = {"bytes": self._left_out, "points": self.points.left_out}
            if any(left.values()):
                append_event(self._events, "recorder_left_out", watch="trainings", **left)

    def _read_all(self, now: Moment, deadline: float, *, last: bool = False) -> None:
        fd = open_plain(self.agent_log)
        if fd is not None:
            with os.fdopen(fd, "rb"):
                self._read_text(fd, self._output, "agent.log", now, deadline, last)
        for parts in list(self._due):
            del self._due[parts]
            source = cut(printable("/".join(parts)), 300)
            for _, file in open_files(self.sweep.workspace, [parts]):
                if self._read_text(file.fileno(), self._logs[parts], source, now, deadline, last):
                    self._due[parts] = None  # it grows; behind the others, because a look may be cut short
            if time.monotonic() >= deadline:
                return

    def _read_text(self, fd: int, log: GrowingFile, source: str, now: Moment, deadline: float, last: bool) -> bool:
        """Read on until the deadline. Return whether there was anything new."""
        behind, begin = log.behind(fd), log.offset
        if behind > MAX_BEHIND_BYTES:
            self._left_out += behind - RESUME_BEHIND_BYTES
            log.offset, log.in_long_line = log.offset + behind - RESUME_BEHIND_BYTES, True
        while True:
            before = log.offset
            piece = log.piece(fd, PIECE_BYTES, last=last)
            log.offset += len(piece)
            if any(hint in piece for hint in HINTS):
                for step in steps_in(piece.decode("utf-8", "replace")):
                    self.points.add(step, source, now)
            if log.offset == before or time.monotonic() >= deadline:
                return log.offset != begin


# --- times of the agent's output: stamps of its log's size. The agent writes to the log directly, so nothing slows it.

STAMP_S = 0.5  # resolution of the stamps; reports need seconds
RESOLUTIONS = ((8 * 2**20, STAMP_S), (12 * 2**20, 2.0), (16 * 2**20, 30.0))
"""(size limit of the stamp file, seconds between stamps below it). Continuous output is stamped for about 24 hours every
STAMP_S, for 48 more every 2 s, for 700 more every 30 s, and then no more."""

TAIL_BYTES = 4096


class OutputStamps:
    """Appends `<byte> <elapsed_s> <at>` when the log's size has changed: the log was written up to this byte by then. A byte
    smaller than that of the line before means that the log was truncated, which any process with its descriptor can do."""

    every_s = STAMP_S

    def __init__(self, log: Path, times: Path, resolutions: tuple[tuple[int, float], ...] = RESOLUTIONS) -> None:
        self.log, self._resolutions = log, resolutions
        times.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(times, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, TAIL_BYTES, max(0, self._written - TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            self._write(b"\n")  # an earlier recorder left half a line
        fields = (tail[: tail.rfind(b"\n") + 1].splitlines() or [b""])[-1].split()
        self._last = int(fields[0]) if fields and fields[0].isdigit() else 0

    def look(self, now: Moment) -> None:
        try:
            info = os.stat(self.log, follow_symlinks=False)
        except FileNotFoundError:
            return
        every_s = next((every_s for limit, every_s in self._resolutions if self._written < limit), None)
        if stat.S_ISREG(info.st_mode) and info.st_size != self._last and every_s is not None:
            self.every_s = every_s
            self._write(f"{info.st_size} {now.elapsed_s:.2f} {now.at}\n".encode())
            self._last = info.st_size

    def close(self, now: Moment) -> None:
        try:
            self.look(now)
        finally:
            os.close(self._fd)

    def _write(self, line: bytes) -> None:
        os.write(self._fd, line)
        self._written += len(line)

"""Follow the training logs of trl, transformers and programs that log like them, and the times of the agent's output.

Read are the agent's output; log files in the workspace, found by name; `trainer_state.json` of checkpoints; and
TensorBoard's event files. A step found in several of them is written once. wandb's offline files are not read. Holds:
trainers by the names of figures, steps in text, `Points`, `FilePosition`, the watch `Trainings`, and `OutputStamps`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import cut, printable
from autorl_hpc.files.safe_open import DIR_FLAGS, lines, open_plain, open_regular, without_escapes
from autorl_hpc.recorder.tfevents import DamagedEvents, records, scalars
from autorl_hpc.recorder.usage import Parts, Sweep
from autorl_hpc.recorder.watch import LineWriter, Moment
from autorl_hpc.records.recorded import TrainingPoint

# --- which trainer logged a step, by the names of its figures.
# Checked by running each trainer of trl 1.16.0 and transformers 5.24.0 for three steps (tests/unit/recorded_logs has their
# output); PPO by the names of trl's PPOTrainer (0.12 to 0.29), ORPO and CPO by their code. Names don't distinguish RLOO from
# GRPO, nor trainers derived from DPOTrainer or KTOTrainer from these.

REWARD = ("reward", "objective/scores", "mean_reward", "rewards/mean", "train_reward")
KL = ("kl", "objective/kl", "approx_kl", "policy/approxkl_avg", "mean_kl", "kl_divergence")
LOSS = ("loss", "loss/policy_avg", "policy_loss", "train_loss_step")
LEARNING_RATE = ("learning_rate", "lr", "actor_lr")
GRAD_NORM = ("grad_norm", "gradient_norm")
STEP = ("step", "global_step", "iteration", "iter")
EPOCH = ("epoch",)
FIELDS: dict[str, tuple[str, ...]] = {
    "step": STEP,
    "epoch": EPOCH,
    "loss": LOSS,
    "reward": REWARD,
    "kl": KL,
    "learning_rate": LEARNING_RATE,
    "grad_norm": GRAD_NORM,
}
"""Fields of TrainingPoint and the names that trainers use for them; the first name found counts."""

Names = Collection[str]


def _all(*wanted: str) -> Callable[[Names], bool]:
    return lambda names: all(name in names for name in wanted)


def _begins(start: str, *wanted: str) -> Callable[[Names], bool]:
    return lambda names: _all(*wanted)(names) and any(name.startswith(start) for name in names)


def _is_ppo(names: Names) -> bool:
    policy = any(name in names for name in ("loss/policy_avg", "policy_loss", "actor_loss", "pg_loss", "actor/pg_loss"))
    value = any(name in names for name in ("loss/value_avg", "value_loss", "critic_loss", "vf_loss", "critic/vf_loss"))
    return (policy and value) or "objective/kl" in names


TRAINERS: tuple[tuple[Callable[[Names], bool], str], ...] = (
    (_all("log_odds_ratio", "nll_loss", "rewards/chosen"), "ORPOTrainer"),
    (_all("nll_loss", "rewards/chosen"), "CPOTrainer"),
    (_begins("objective/", "rewards/chosen"), "OnlineDPOTrainer"),
    (_all("rewards/chosen", "rewards/accuracies"), "DPOTrainer"),
    (_all("rewards/chosen", "kl"), "KTOTrainer"),
    (_is_ppo, "PPOTrainer"),
    (_begins("completions/", "reward"), "GRPOTrainer"),
    (_all("mean_reward", "margin"), "RewardTrainer"),
    (_all("mean_token_accuracy"), "SFTTrainer"),
    (_all("loss", "grad_norm"), "Trainer"),
    (_all("loss", "learning_rate"), "Trainer"),
)
"""The first match counts."""


def trainer_of(figures: Mapping[str, float] | Names) -> str | None:
    """Return the trainer that logs figures of these names; None if they don't show it. The prefix `eval_` is ignored."""
    names = {name.removeprefix("eval_") for name in figures}
    return next((trainer for holds, trainer in TRAINERS if holds(names)), None)


# --- logged steps in text: flat dictionaries as Python or JSON writes them, anywhere in the text. Nothing is evaluated.
# transformers 5 prints `{'loss': '0.3461', ..., 'epoch': '0.0625'}` (four digits, as text), transformers 4 prints numbers.
# They also appear in an agent's own trace, as a tool's output in JSON, and after progress bars.

MAX_FIGURES = 120
"""Limit for one step; trl's largest has 26, and more with many reward functions."""

MAX_NAME_CHARS = 100
MAX_STEP = 2**53
HINTS = (b"loss", b"reward")
"""Text without any of these has no step."""

_DICT = re.compile(r"\{[^{}]{8,12288}\}")
_PAIR = re.compile(
    r"\s{0,8}(?:'([^'\"\\]{1,200})'|\"([^'\"\\]{1,200})\")\s{0,8}:\s{0,8}"
    r"(?:'([^'\\]{0,400})'|\"([^\"\\]{0,400})\"|([^\s,'\"\[\]()]{1,64})|(\[[^\[\]]{0,2000}\]))\s{0,8}(,|$)"
)
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_PROGRESS = {*FIELDS["step"], *FIELDS["epoch"], *FIELDS["learning_rate"], *FIELDS["grad_norm"], "train_runtime"}
"""A trainer's log has one of these beside a loss or a reward; other dictionaries with a loss often don't."""


@dataclass(frozen=True)
class LoggedStep:
    """Figures of one logged step, by the trainer's names.

    Attributes:
        not_finite: names of figures that were NaN or infinite.
    """

    figures: dict[str, float]
    not_finite: tuple[str, ...] = ()

    def fields(self) -> dict[str, object]:
        """Return the fields of TrainingPoint."""
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
        """Return a text that is the same for a step as printed (four digits, an epoch, no step) and as in trainer_state.json."""
        fields = self.fields()
        more = fields.pop("more")
        assert isinstance(more, dict)
        kept = {**{name: value for name, value in fields.items() if name in FIELDS}, **more}
        kept.update(dict.fromkeys(self.not_finite, math.nan))
        twice = {"total_flos", *(("step",) if "epoch" in kept else ())}
        return ";".join(f"{name}={kept[name]:.4g}" for name in sorted(kept) if name not in twice)


def steps_in(text: str) -> Iterator[LoggedStep]:
    """Yield the steps in a text, in order."""
    for found in _DICT.finditer(without_escapes(text)):
        inner = found[0][1:-1]
        if "loss" in inner or "reward" in inner:
            step = step_of(_pairs(inner.replace('\\"', '"') if '\\"' in inner else inner))
            if step is not None:
                yield step


def step_of(values: Mapping[str, object]) -> LoggedStep | None:
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


def _pairs(inner: str) -> dict[str, object]:
    """Return names and values of a flat dictionary; empty if it is anything else."""
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


# --- the file of logged steps, each written once

MAX_BYTES = 64 * 2**20
"""Holds some hundred thousand steps."""


class Points:
    """Appends points to a file. Steps with the same figures, to four digits, count as the same step, whatever their source, so
    a second training with identical figures is not recorded."""

    def __init__(self, path: Path) -> None:
        self._known: set[bytes] = set()
        for line in lines(path, max_bytes=MAX_BYTES, max_line_bytes=64 * 1024):
            try:
                self._known.add(_digest(_step(TrainingPoint.model_validate_json(line.text))))
            except ValidationError:
                continue  # cut by a crash or a limit
        self._lines = LineWriter(path, MAX_BYTES)
        self.left_out = 0

    def add(self, step: LoggedStep, source: str, now: Moment) -> None:
        """Write a step if it is new."""
        digest = _digest(step)
        if digest in self._known:
            return
        if self._lines.full:
            self.left_out += 1
            return
        self._known.add(digest)
        self._lines.add(TrainingPoint.model_validate({**now.told(), "source": source, **step.fields()}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _digest(step: LoggedStep) -> bytes:
    return hashlib.blake2b(step.signature().encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _step(point: TrainingPoint) -> LoggedStep:
    named = {
        name: getattr(point, name) for name in ("step", "epoch", "loss", "reward", "kl", "learning_rate", "grad_norm")
    }
    figures = {name: float(value) for name, value in named.items() if value is not None}
    return LoggedStep({**figures, **point.more}, point.not_finite)


# --- a growing file, read in small pieces without falling far behind. It may be cut, replaced or 50 GB long.

PIECE_BYTES = 256 * 2**10
"""Size of one read."""

MAX_BEHIND_BYTES = 64 * 2**20
RESUME_BEHIND_BYTES = 8 * 2**20
"""If reading is more than MAX_BEHIND_BYTES behind, it continues this far from the end; the bytes between are never read."""

HEAD_BYTES = 256
"""First bytes that distinguish a rewritten file from one that grew."""

MAX_OPEN_BYTES = 16 * 2**10
"""How far after an opening brace its closing one is waited for."""

_LINE_END = re.compile(rb"[\r\n]")


class FilePosition:
    """How far a file has been read. The caller opens it anew for each look, because an agent may remove the file.

    Attributes:
        offset: everything before it was read.
        size: size at the last look.
        skipped: number of bytes that were skipped.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.size = 0
        self.skipped = 0
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._changed_ns = 0
        self._resuming = False

    def is_other(self, status: os.stat_result) -> bool:
        """Return whether the file is another one, was written to since it was read, or is not read to its end."""
        seen = (self._file, self._changed_ns, self.offset)
        return seen != ((status.st_dev, status.st_ino), status.st_mtime_ns, status.st_size)

    def read(self, fd: int, *, jump: bool = True) -> bytes:
        """Return the next piece; empty at the end. A file that was cut, replaced or rewritten is read from its start.

        Args:
            jump: whether bytes may be skipped if reading is far behind.
        """
        info = os.fstat(fd)
        head = os.pread(fd, HEAD_BYTES, 0) if self._changed_ns != info.st_mtime_ns else self._head
        if self._file != (info.st_dev, info.st_ino) or info.st_size < self.offset or not head.startswith(self._head):
            self.offset, self._resuming = 0, False
        self._file, self._head, self._changed_ns = (info.st_dev, info.st_ino), head, info.st_mtime_ns
        self.size = info.st_size
        if jump and self.size - self.offset > MAX_BEHIND_BYTES:
            self.skipped += self.size - RESUME_BEHIND_BYTES - self.offset
            self.offset, self._resuming = self.size - RESUME_BEHIND_BYTES, True
        return os.pread(fd, PIECE_BYTES, self.offset)

    def lines(self, fd: int, *, rest: bool = False) -> bytes:
        """Return the next whole lines, ended by newline or carriage return; a line longer than a piece is skipped. They don't
        end inside braces, because rich breaks a dictionary into several lines.

        Args:
            rest: also return a last line without an end.
        """
        piece = self.read(fd)
        if not piece:
            return b""
        first = _LINE_END.search(piece) if self._resuming else None
        begin = first.end() if first is not None else 0
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        at_end = self.offset + len(piece) >= self.size
        if rest and at_end:
            end = len(piece)
        if end == 0:
            if len(piece) == PIECE_BYTES:
                self.offset, self._resuming = self.offset + len(piece), True
            return b""
        if not (rest and at_end):
            end = self._before_open_brace(piece, begin, end)
        self.offset, self._resuming = self.offset + end, False
        return piece[begin:end]

    @staticmethod
    def _before_open_brace(piece: bytes, begin: int, end: int) -> int:
        opening = piece.rfind(b"{", begin, end)
        waits = opening >= 0 and end - opening < MAX_OPEN_BYTES and b"}" not in piece[opening:end]
        # If the brace begins a full piece, waiting would never end.
        return opening if waits and (opening > 0 or len(piece) < PIECE_BYTES) else end


LOOK_S = 2.0
SLICE_S = 0.02
"""1 % of a core while logs grow faster than they are read; otherwise much less."""

CLOSE_S = 2.0
"""Limit for reading the rest after the agent's end."""

MAX_STATE_BYTES = 32 * 2**20
"""Limit for a trainer_state.json: about thirty thousand logged steps of GRPO."""

STATE_SHARE = 0.003
"""Share of a core for reading these: each checkpoint repeats all steps before it."""

MAX_FILES = 10_000
MAX_ACTIVE = 64
"""Logs that are read at each look; others wait for the next walk."""

IDLE_S = 600.0
GROWING_S = 10.0
STATE = "trainer_state.json"
EVENTS = "events.out.tfevents."
LOG_ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".ndjson")
SKIPPED_AT_TOP = {"data", "models", "submissions", "results", ".git", ".agent"}
SKIPPED = {".git", "site-packages", "node_modules", "__pycache__", ".venv", "venv", "dist-packages", ".cache"}
"""Folders in which no training writes logs."""


def is_log(parts: Parts) -> bool:
    """Return whether a file of the workspace may be a training log, by its name and place."""
    name = parts[-1]
    if parts[0] in SKIPPED_AT_TOP or not SKIPPED.isdisjoint(parts):
        return False
    return name == STATE or name.startswith((EVENTS, "nohup", "stdout", "stderr")) or name.endswith(LOG_ENDINGS)


class Trainings:
    """Writes a `TrainingPoint` for each step that a trainer logged.

    Args:
        sweep: finds the logs in its workspace.
        path: file for the points; points already in it are not written again.
        events: file for the report, at the end, of what was not read.
    """

    name = "trainings"
    every_s = LOOK_S

    def __init__(self, agent_log: Path, sweep: Sweep, path: Path, events: Path) -> None:
        self.agent_log = agent_log
        self.sweep = sweep
        self.workspace = sweep.workspace
        self.points = Points(path)
        self._events = events
        self._output = FilePosition()
        self._met: deque[tuple[Parts, os.stat_result]] = deque(maxlen=MAX_FILES)
        self._logs: dict[Parts, FilePosition] = {}
        self._active: OrderedDict[Parts, float] = OrderedDict()
        self._states: dict[Parts, tuple[int, int, int]] = {}
        self._changed: OrderedDict[Parts, None] = OrderedDict()
        self._next_state = 0.0
        self._groups: dict[Parts, tuple[int, dict[str, float]]] = {}
        self._too_large: set[Parts] = set()
        sweep.visitors.append(self.found)

    def found(self, parts: Parts, status: os.stat_result) -> None:
        """Take a file of the workspace from the walk. Called in the walk's thread."""
        if status.st_size and is_log(parts):
            self._met.append((parts, status))

    def _take_met(self, deadline: float) -> None:
        while self._met and time.monotonic() < deadline:
            self._sort_in(*self._met.popleft())

    def _sort_in(self, parts: Parts, status: os.stat_result) -> None:
        if parts[-1] == STATE:
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._states.get(parts) != identity and len(self._states) < MAX_FILES:
                self._states[parts] = identity
                self._changed[parts] = None
            return
        log = self._logs.get(parts)
        if log is None:
            if len(self._logs) >= MAX_FILES:
                return
            log = self._logs[parts] = FilePosition()
        if log.is_other(status) and parts not in self._active and self._makes_room():
            self._active[parts] = time.monotonic()

    def _makes_room(self) -> bool:
        """Return whether another log can be read at each look. One that has stopped growing makes room and waits for the next
        walk."""
        if len(self._active) < MAX_ACTIVE:
            return True
        oldest = min(self._active, key=lambda parts: self._active[parts])
        if time.monotonic() - self._active[oldest] < GROWING_S:
            return False
        del self._active[oldest]
        return True

    def look(self, now: Moment) -> None:
        """Read what is new, for SLICE_S at most."""
        deadline = time.monotonic() + SLICE_S
        self._take_met(deadline)
        self._read_all(now, deadline)
        if self._changed and time.monotonic() >= self._next_state:
            begun = time.monotonic()
            self._read_states(now, begun)
            self._next_state = begun + (time.monotonic() - begun) / STATE_SHARE

    def close(self, now: Moment) -> None:
        """Search logs a last time and read the rest, including last lines without an end, for CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        try:
            self.sweep.show(self.found, time.monotonic() + CLOSE_S / 3)
            self._take_met(deadline)
            self._read_all(now, deadline, rest=True)
            self._read_states(now, deadline)
            for parts in list(self._groups):
                self._end_group(parts, now)
        finally:
            self.points.close()
            skipped = self._output.skipped + sum(log.skipped for log in self._logs.values())
            left = {"bytes": skipped, "states": len(self._too_large), "points": self.points.left_out}
            if any(left.values()):
                append_event(self._events, "recorder_left_out", watch=self.name, **left)

    def _read_all(self, now: Moment, deadline: float, rest: bool = False) -> None:
        fd = open_plain(self.agent_log)
        if fd is not None:
            try:
                self._read_text(fd, self._output, "agent.log", now, deadline, rest)
            finally:
                os.close(fd)
        if not self._active:
            return
        root_fd = os.open(self.workspace, DIR_FLAGS)
        try:
            for parts in list(self._active):
                self._active.move_to_end(parts)  # a log that is cut short waits for its next turn
                self._read_log(root_fd, parts, now, deadline, rest)
                if time.monotonic() >= deadline:
                    return
        finally:
            os.close(root_fd)

    def _read_log(self, root_fd: int, parts: Parts, now: Moment, deadline: float, rest: bool) -> None:
        log, before = self._logs[parts], self._logs[parts].offset
        fd = _opened(root_fd, parts)
        if fd is None:
            del self._active[parts]
            return
        try:
            if parts[-1].startswith(EVENTS):
                self._read_events(fd, log, parts, now, deadline)
            else:
                self._read_text(fd, log, _source(parts), now, deadline, rest)
        finally:
            os.close(fd)
        if log.offset != before:
            self._active[parts] = time.monotonic()
        elif time.monotonic() - self._active[parts] > IDLE_S:
            del self._active[parts]
            self._end_group(parts, now)

    def _read_text(self, fd: int, log: FilePosition, source: str, now: Moment, deadline: float, rest: bool) -> None:
        while True:
            before = log.offset
            piece = log.lines(fd, rest=rest)
            if any(hint in piece for hint in HINTS):
                for step in steps_in(piece.decode("utf-8", "replace")):
                    self.points.add(step, source, now)
            if log.offset == before or time.monotonic() >= deadline:
                return

    def _read_events(self, fd: int, log: FilePosition, parts: Parts, now: Moment, deadline: float) -> None:
        while piece := log.read(fd, jump=False):
            try:
                found, taken = records(piece, log.size - log.offset)
            except DamagedEvents:
                log.offset = log.size
                return
            for record in found:
                try:
                    self._gather(parts, *scalars(record), now)
                except DamagedEvents:
                    continue
            log.offset += taken
            if not taken or time.monotonic() >= deadline:
                return

    def _gather(self, parts: Parts, step: int, values: dict[str, float], now: Moment) -> None:
        """Collect TensorBoard's events, which have one figure each; consecutive ones of the same step make one logged step."""
        for tag, value in values.items():
            split, _, name = tag.partition("/")
            name = name if split == "train" else f"eval_{name}" if split == "eval" else tag
            gathered = self._groups.get(parts)
            if gathered is not None and (gathered[0] != step or name in gathered[1] or _is_eval(name, gathered[1])):
                self._end_group(parts, now)
                gathered = None
            if gathered is None:
                gathered = self._groups[parts] = (step, {"step": float(step)})
            gathered[1][name] = value

    def _end_group(self, parts: Parts, now: Moment) -> None:
        gathered = self._groups.pop(parts, None)
        step = step_of(gathered[1]) if gathered is not None else None
        if step is not None:
            self.points.add(step, _source(parts), now)

    def _read_states(self, now: Moment, deadline: float) -> None:
        """Read changed trainer_state.json files until the deadline, at least one."""
        if not self._changed:
            return
        root_fd = os.open(self.workspace, DIR_FLAGS)
        try:
            while self._changed:
                parts, _ = self._changed.popitem(last=False)
                for step in self._state_steps(root_fd, parts):
                    self.points.add(step, _source(parts), now)
                if time.monotonic() >= deadline:
                    return
        finally:
            os.close(root_fd)

    def _state_steps(self, root_fd: int, parts: Parts) -> list[LoggedStep]:
        fd = _opened(root_fd, parts)
        if fd is None:
            return []
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_STATE_BYTES + 1)
        if len(data) > MAX_STATE_BYTES:
            self._too_large.add(parts)
            return []
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            self._states.pop(parts, None)  # probably half-written: read again on the next walk
            return []
        history = state.get("log_history") if isinstance(state, dict) else None
        entries = history if isinstance(history, list) else []
        return [step for entry in entries if isinstance(entry, dict) and (step := step_of(entry)) is not None]


def _is_eval(name: str, gathered: dict[str, float]) -> bool:
    """Return whether a figure of an evaluation follows those of training at the same step, or the reverse."""
    others = gathered.keys() - {"step", "epoch"}
    return name != "epoch" and any(other.startswith("eval_") is not name.startswith("eval_") for other in others)


def _opened(root_fd: int, parts: Parts) -> int | None:
    try:
        return open_regular(root_fd, parts)
    except OSError:
        return None


def _source(parts: Parts) -> str:
    return cut(printable("/".join(parts)), 300)


# --- times of the agent's output: stamps of its log's size. The agent writes to the log directly, so nothing slows it.

STAMP_S = 0.5
"""Resolution of the stamps; reports need seconds."""

RESOLUTIONS = ((8 * 2**20, STAMP_S), (12 * 2**20, 2.0), (16 * 2**20, 30.0))
"""(size limit of the stamp file, seconds between stamps below it). Continuous output is stamped for about 24 hours every
STAMP_S, for 48 more every 2 s, for 700 more every 30 s, and then no more."""

TAIL_BYTES = 4096


class OutputStamps:
    """Appends `<byte> <elapsed_s> <at>` when the log's size has changed: the log was written up to this byte by then. A byte
    smaller than that of the line before means that the log was truncated, which any process with its descriptor can do."""

    name = "output"

    def __init__(self, log: Path, times: Path) -> None:
        self.log = log
        self.every_s = STAMP_S
        times.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(times, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written = os.fstat(self._fd).st_size
        self._last = self._mend()

    def look(self, now: Moment) -> None:
        """Write a stamp if the log's size has changed."""
        try:
            info = os.stat(self.log, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(info.st_mode) or info.st_size == self._last:
            return
        every_s = next((every_s for limit, every_s in RESOLUTIONS if self._written < limit), None)
        if every_s is None:
            return
        self.every_s = every_s
        self._write(f"{info.st_size} {now.elapsed_s:.2f} {now.at}\n".encode())
        self._last = info.st_size

    def close(self, now: Moment) -> None:
        """Write the last stamp."""
        try:
            self.look(now)
        finally:
            os.close(self._fd)

    def _write(self, line: bytes) -> None:
        os.write(self._fd, line)
        self._written += len(line)

    def _mend(self) -> int:
        """End a line that an earlier recorder left half-written. Return the size in its last stamp."""
        tail = os.pread(self._fd, TAIL_BYTES, max(0, self._written - TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            self._write(b"\n")
        fields = (tail[: tail.rfind(b"\n") + 1].splitlines() or [b""])[-1].split()
        return int(fields[0]) if fields and fields[0].isdigit() else 0

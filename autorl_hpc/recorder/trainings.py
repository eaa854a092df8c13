"""Follow the training logs of trainers' libraries and of own loops (`STYLES`), and the times of the agent's output.

Read are the agent's output; log files in the workspace, found by name; `trainer_state.json` of checkpoints; and
TensorBoard's event files. A step found in several of them is written once. wandb's offline files are not read.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import os
import re
import stat
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import cut
from autorl_hpc.files.safe_open import open_plain, without_escapes
from autorl_hpc.recorder.tfevents import DamagedEvents, records, scalars
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import GrowingFile, LineWriter, Moment, Parts, open_files
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TrainingPoint

# --- which trainer logged a step, by the names of its figures.
# Checked by running each trainer of trl 1.16.0 and transformers 5.24.0 for three steps (tests/unit/recorded_logs has their
# output); PPO by the names of trl's PPOTrainer (0.12 to 0.29), ORPO and CPO by their code. Names don't distinguish RLOO from
# GRPO, nor trainers derived from DPOTrainer or KTOTrainer from these.

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
"""Fields of TrainingPoint and the names that trainers use for them; the first name found counts."""

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
"""Names that must all be there, a beginning that some name must have, and the trainer; the first match counts."""

SAME = {
    **dict.fromkeys(("loss/policy_avg", "actor_loss", "pg_loss", "actor/pg_loss", "act_loss"), "policy_loss"),
    **dict.fromkeys(("loss/value_avg", "critic_loss", "vf_loss", "critic/vf_loss"), "value_loss"),
}


def trainer_of(figures: Collection[str]) -> str | None:
    """Return the trainer that logs figures of these names; None if they don't show it. The prefix `eval_` is ignored."""
    names = {name.removeprefix("eval_") for name in figures}
    names |= {SAME[name] for name in names if name in SAME}
    for wanted, beginning, trainer in TRAINERS:
        if names.issuperset(wanted.split()) and any(name.startswith(beginning) for name in names):
            return trainer
    return None


# --- logged steps in text: dictionaries as Python or JSON writes them (also one in another), and lines of names and numbers
# (`STYLES`), anywhere in the text. Nothing is evaluated. transformers 5 prints `{'loss': '0.3461', ..., 'epoch': '0.0625'}` (four
# digits, as text), transformers 4 prints numbers. They also appear in an agent's own trace, as a tool's output in JSON, and
# after progress bars. tests/unit/recorded_logs has a sample of each style, by the libraries' own source.

MAX_FIGURES = 120
"""Limit for one step; trl's largest has 26, and more with many reward functions."""

MAX_NAME_CHARS = 100
MAX_STEP = 2**53
HINTS = (b"loss", b"reward", b"Loss", b"Reward", b"LOSS")
"""Text without any of these has no step."""

_DICT = re.compile(r"\{(?:[^{}()]|\{[^{}()]{1,4096}\}){8,12288}\}")
_OPENRLHF = re.compile(r"Global step (\d{1,12}): \{")
"""It prints a step's number before its dictionary."""

_ROWS = re.compile(r"(<td>\d+</td>)(?:\\n|\W){1,40}(?=<td>)")
"""A notebook's row of step and loss is on several lines."""

_BARE = re.compile(r"(?<=[:\s])-?(?:nan|inf|null)\b", re.IGNORECASE)
"""As Python's repr and JSON write what is no literal."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_VALUE = r"(?P<value>[+-]?(?:\d{1,40}(?:\.\d{0,40})?(?:e[+-]?\d{1,4})?|nan|inf))(?![\w.]*[A-Za-z_(])"

STYLES: tuple[tuple[str, str, str], ...] = (
    # (style, what a line has, with its step or epoch if these have no names; names and numbers in it)
    ("torchtune's bar", r"(?P<epoch>\d+)\|(?P<step>\d+)\|loss: ", r"\|(?P<name>loss): " + _VALUE),
    ("verl", r"\bstep:(?P<step>\d+) - ", r" - (?P<name>[\w/@.-]+):" + _VALUE),
    ("progress bar", r" (?P<step>\d+)/(?:\d+|\?) \[[^\]]*, \w+=", r"[ ,](?P<name>[\w/]+)=" + _VALUE),
    ("notebook", r"<td>(?P<step>\d+)</td>\W*<td>[\d.]+</td>", r"(?P<name>)</td>\W*<td>" + _VALUE),
    (
        "own print, torchtune",
        r"\b(?:steps?|iter|iteration|epoch|ep|update|global_step)\b\W{0,4}\d",
        r"(?P<name>[a-z][\w/@.-]{0,60})[\]')\"]{0,2}(?:\s{0,6}[:=]\s{0,6}|\s{1,6})[\[(]?" + _VALUE,
    ),
)
"""Lines of names and numbers; the first style that a line has counts. A notebook's table has the training loss without a name."""

_STYLES = tuple((re.compile(line, re.I), re.compile(pair, re.I)) for _, line, pair in STYLES)
MAX_LINE_CHARS = 20_000
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

    def fields(self) -> dict[str, Any]:
        """Return the fields of TrainingPoint."""
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
        """Return a hash that is the same for a step as printed (four digits, an epoch, no step) and as in trainer_state.json."""
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
    """Return the step of the first style that a line has."""
    for pattern, pair in _STYLES:
        if (head := pattern.search(line)) is not None:
            named = {found["name"].lower() or "training loss": found["value"] for found in pair.finditer(line)}
            step = step_of({**head.groupdict(), **named})
            if step is not None and any("loss" in n or "reward" in n for n, v in named.items() if not v.isdigit()):
                return step
    return None


def _flat(text: str) -> dict[object, object]:
    """Return a dictionary in a text, what is in an inner one at its own names."""
    found: dict[object, object] = {}
    for name, value in _literal(_BARE.sub(r"'\g<0>'", text.replace('\\"', '"'))).items():
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


def _literal(text: str) -> dict[object, object]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


# --- the file of logged steps, each written once

MAX_BYTES = 64 * 2**20
"""Holds some hundred thousand steps."""


class Points:
    """Appends points to a file. Steps with the same figures, to four digits, count as the same step, whatever their source, so
    a second training with identical figures is not recorded."""

    def __init__(self, path: Path) -> None:
        self._known: set[bytes] = set()
        fd = open_plain(path)
        with os.fdopen(fd, "rb") if fd is not None else io.BytesIO() as file:
            for line in file:
                try:
                    point = TrainingPoint.model_validate_json(line)
                except ValidationError:
                    continue  # cut by a crash or a limit
                figures = {name: float(value) for name in FIELDS if (value := getattr(point, name)) is not None}
                self._known.add(LoggedStep({**figures, **point.more}, point.not_finite).digest())
        self._lines = LineWriter(path, MAX_BYTES)
        self.left_out = 0

    def add(self, step: LoggedStep, source: str, now: Moment) -> None:
        """Write a step if it is new."""
        digest = step.digest()
        if digest in self._known:
            return
        if self._lines.full:
            self.left_out += 1
            return
        self._known.add(digest)
        self._lines.add(TrainingPoint.model_validate({**now.fields(), "source": source, **step.fields()}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


# --- growing logs. They may be cut, replaced or 50 GB long.

PIECE_BYTES = 1 << 20
"""Size of one read, and of the longest line."""

MAX_BEHIND_BYTES = 64 * 2**20
RESUME_BEHIND_BYTES = 8 * 2**20
"""If reading is more than MAX_BEHIND_BYTES behind, it continues this far from the end; the bytes between are never read."""


@dataclass
class GrowingLog:
    """How far a log was read. It is opened anew for each look, because an agent may remove it.

    Attributes:
        inode: which file was read; another one is read from its start, and so is one that was cut.
        left_out: number of bytes that were not read.
        tag_step, tags: of an event file, the step whose figures are being collected.
    """

    position: GrowingFile = field(default_factory=GrowingFile)
    inode: int = 0
    size: int = 0
    left_out: int = 0
    tag_step: int = 0
    tags: dict[str, float] = field(default_factory=dict)

    def begin(self, fd: int, *, jump: bool) -> None:
        """Look at the file's size. With `jump`, bytes are left out if reading is far behind."""
        status = os.fstat(fd)
        if self.inode != status.st_ino or status.st_size < self.position.offset:
            self.position, self.inode = GrowingFile(), status.st_ino
        self.size = status.st_size
        behind = self.size - self.position.offset
        if jump and behind > MAX_BEHIND_BYTES:
            self.left_out += behind - RESUME_BEHIND_BYTES
            self.position.offset, self.position.in_long_line = self.size - RESUME_BEHIND_BYTES, True


# --- the watch

LOOK_S = 2.0
SLICE_S = 0.02
"""1 % of a core while logs grow faster than they are read; otherwise much less."""

CLOSE_S = 2.0
"""Limit for reading the rest after the agent's end."""

MAX_STATE_BYTES = 32 * 2**20
"""Limit for a trainer_state.json: about thirty thousand logged steps of GRPO."""

MAX_FILES = 10_000
STATE = "trainer_state.json"
EVENTS = "events.out.tfevents."
LOG_ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".ndjson", ".ipynb")
SKIPPED_AT_TOP = {"data", "models", "submissions", "results", ".git", ".agent", ".observed"}
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
        slice_s, close_s: limits of a look, and of reading after the agent's end.
    """

    every_s = LOOK_S

    def __init__(
        self,
        agent_log: Path,
        sweep: Sweep,
        path: Path,
        events: Path,
        slice_s: float = SLICE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self.agent_log, self.sweep, self.points = agent_log, sweep, Points(path)
        self._events, self._slice_s, self._close_s = events, slice_s, close_s
        self._output = GrowingLog()
        self._met: deque[tuple[Parts, tuple[int, ...]]] = deque(maxlen=MAX_FILES)
        self._seen: dict[Parts, tuple[int, ...]] = {}
        self._logs: defaultdict[Parts, GrowingLog] = defaultdict(GrowingLog)
        self._due: dict[Parts, None] = {}
        self._changed: dict[Parts, None] = {}
        self._too_large: set[Parts] = set()
        sweep.visitors.append(self.found)

    def found(self, parts: Parts, status: os.stat_result) -> None:
        """Take a file of the workspace from the walk. Called in the walk's thread."""
        if status.st_size and stat.S_ISREG(status.st_mode) and is_log(parts):
            self._met.append((parts, (status.st_ino, status.st_size, status.st_mtime_ns)))

    def look(self, now: Moment) -> None:
        """Read what is new, for `slice_s` at most, and one trainer_state.json."""
        deadline = time.monotonic() + self._slice_s
        self._sort_in()
        self._read_all(now, deadline)
        self._read_states(now, time.monotonic())

    def close(self, now: Moment) -> None:
        """Search logs a last time and read the rest, including last lines without an end, for `close_s` at most."""
        deadline = time.monotonic() + self._close_s
        try:
            self.sweep.show(self.found, time.monotonic() + self._close_s / 3)
            self._sort_in()
            self._read_all(now, deadline, last=True)
            self._read_states(now, deadline)
            for parts, log in self._logs.items():
                self._end_step(parts, log, now)
        finally:
            self.points.close()
            skipped = self._output.left_out + sum(log.left_out for log in self._logs.values())
            left = {"bytes": skipped, "states": len(self._too_large), "points": self.points.left_out}
            if any(left.values()):
                append_event(self._events, "recorder_left_out", watch="trainings", **left)

    def _sort_in(self) -> None:
        while self._met:
            parts, identity = self._met.popleft()
            if self._seen.get(parts) != identity and (parts in self._seen or len(self._seen) < MAX_FILES):
                self._seen[parts] = identity
                (self._changed if parts[-1] == STATE else self._due)[parts] = None

    def _read_all(self, now: Moment, deadline: float, *, last: bool = False) -> None:
        fd = open_plain(self.agent_log)
        if fd is not None:
            with os.fdopen(fd, "rb"):
                self._read_text(fd, self._output, "agent.log", now, deadline, last)
        for parts, file in open_files(self.sweep.workspace, _taken(self._due)) if self._due else ():
            log = self._logs[parts]
            before = log.position.offset
            if parts[-1].startswith(EVENTS):
                self._read_events(file.fileno(), log, parts, now, deadline)
            else:
                self._read_text(file.fileno(), log, _source(parts), now, deadline, last)
            if log.position.offset != before:
                self._due[parts] = None  # behind the others, because a look may be cut short
            if time.monotonic() >= deadline:
                return

    def _read_text(self, fd: int, log: GrowingLog, source: str, now: Moment, deadline: float, last: bool) -> None:
        log.begin(fd, jump=True)
        while True:
            before = log.position.offset
            piece = log.position.piece(fd, PIECE_BYTES, last=last)
            log.position.offset += len(piece)
            if any(hint in piece for hint in HINTS):
                for step in steps_in(piece.decode("utf-8", "replace")):
                    self.points.add(step, source, now)
            if log.position.offset == before or time.monotonic() >= deadline:
                return

    def _read_events(self, fd: int, log: GrowingLog, parts: Parts, now: Moment, deadline: float) -> None:
        log.begin(fd, jump=False)
        position = log.position
        while piece := os.pread(fd, PIECE_BYTES, position.offset):
            try:
                found, taken = records(piece, log.size - position.offset)
            except DamagedEvents:
                position.offset = log.size
                return
            for record in found:
                try:
                    self._collect(parts, log, *scalars(record), now)
                except DamagedEvents:
                    continue
            position.offset += taken
            if not taken or time.monotonic() >= deadline:
                return

    def _collect(self, parts: Parts, log: GrowingLog, step: int, values: dict[str, float], now: Moment) -> None:
        for tag, value in values.items():
            split, _, name = tag.partition("/")
            name = name if split == "train" else f"eval_{name}" if split == "eval" else tag
            if log.tag_step != step or name in log.tags or _is_of_other_kind(name, log.tags):
                self._end_step(parts, log, now)
            log.tag_step = step
            log.tags[name] = value

    def _end_step(self, parts: Parts, log: GrowingLog, now: Moment) -> None:
        step = step_of({"step": float(log.tag_step), **log.tags})
        if step is not None:
            self.points.add(step, _source(parts), now)
        log.tags.clear()

    def _read_states(self, now: Moment, deadline: float) -> None:
        """Read changed trainer_state.json files until the deadline, at least one. Each repeats all steps before it."""
        for parts, file in open_files(self.sweep.workspace, _taken(self._changed)) if self._changed else ():
            self._read_state(parts, file.read(MAX_STATE_BYTES + 1), now)
            if time.monotonic() >= deadline:
                return

    def _read_state(self, parts: Parts, data: bytes, now: Moment) -> None:
        if len(data) > MAX_STATE_BYTES:
            self._too_large.add(parts)
            return
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            self._seen.pop(parts, None)  # probably half-written: read again on the next walk
            return
        history = state.get("log_history") if isinstance(state, dict) else None
        for entry in history if isinstance(history, list) else []:
            step = step_of(entry) if isinstance(entry, dict) else None
            if step is not None:
                self.points.add(step, _source(parts), now)


def _is_of_other_kind(name: str, others: Collection[str]) -> bool:
    return name != "epoch" and any(
        other.startswith("eval_") is not name.startswith("eval_") for other in others if other != "epoch"
    )


def _taken(waiting: dict[Parts, None]) -> Iterator[Parts]:
    for parts in list(waiting):
        del waiting[parts]
        yield parts


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

    def __init__(self, log: Path, times: Path, resolutions: tuple[tuple[int, float], ...] = RESOLUTIONS) -> None:
        self.log = log
        self._resolutions = resolutions
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
        every_s = next((every_s for limit, every_s in self._resolutions if self._written < limit), None)
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

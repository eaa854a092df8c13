"""Records that the recorder writes into a run's folder, one JSON object per line. Agents can influence them, so no score
depends on them.

`elapsed_s` is the budget used, as in the ledger, over all attempts; `at` is the node's wall-clock time, for people.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from autorl_hpc.records.base import Strict

TraceKind = Literal["session", "usage", "tool_call", "tool_result", "message", "error", "end", "position"]
"""session: an agent's program identifies itself; usage: tokens or cost; message: the length of the driver's words;
position: the recorder has read up to `offset`."""


class Seen(Strict):
    """When something was seen."""

    elapsed_s: float = Field(ge=0, description="Budget used.")
    at: str
    attempt: int = Field(1, ge=1)


class TraceEvent(Seen):
    """One thing that an agent's own trace says. Null: the trace doesn't say."""

    kind: TraceKind
    source: str = Field(description="`agent.log`, or the trace's file relative to the workspace.")
    offset: int = Field(ge=0, description="Byte at which the line begins; in a JSON document, the message's number.")
    format: str = Field(description="Which agent's format: claude-code, codex, gemini-cli, opencode, openhands, mini.")
    model: str | None = None
    tokens_in: int | None = Field(None, ge=0, description="Of this call; all input, cached input among it.")
    tokens_out: int | None = Field(None, ge=0, description="Of this call; reasoning among it.")
    tokens_cached: int | None = Field(None, ge=0, description="Input read from a cache, part of tokens_in.")
    cost_usd: float | None = Field(None, ge=0)
    is_total: bool = Field(False, description="Figures since the session's start and not of one call.")
    session: str | None = Field(None, description="The session's own name; a resumed one keeps it.")
    calls: int | None = Field(None, ge=0, description="Of a total: calls of the driver.")
    tool_calls: int | None = Field(None, ge=0, description="Of a total.")
    tool_failures: int | None = Field(None, ge=0, description="Of a total.")
    duration_s: float | None = Field(None, ge=0, description="Of a tool call, where the trace gives it.")
    chars: int | None = Field(None, ge=0, description="Length of a message.")
    skipped: int = Field(0, ge=0, description="Of a position: lines too long to be read, since the one before.")
    call_id: str | None = None
    tool: str | None = None
    command: str | None = Field(None, description="Of a tool call that runs a program or writes a file: its beginning.")
    exit_code: int | None = None
    ok: bool | None = None
    text: str | None = Field(None, description="Beginning of an error, or of the last message.")


class TrajectoryMessage(Seen):
    """A message of a trajectory in the workspace (mini-swe-agent's `*.traj.json`), kept because the file is rewritten."""

    source: str = Field(description="The trajectory's file relative to the workspace.")
    session: str | None = None
    message: str = Field(description="The message as JSON, with secrets masked.")


class GpuSample(Strict):
    """One GPU that the agent may use."""

    index: int
    name: str = ""
    uuid: str = ""
    used_share: float | None = Field(None, ge=0, le=1, description="Of the time since the last one, a kernel ran.")
    memory_bytes: int | None = Field(None, ge=0)
    memory_total_bytes: int | None = Field(None, ge=0)
    power_w: float | None = Field(None, ge=0)


class UsageSample(Seen):
    """What the agent's processes use, every few seconds. Null: it could not be measured."""

    cpu_s: float | None = Field(None, ge=0, description="CPU seconds of this attempt so far, with ended processes.")
    memory_bytes: int | None = Field(None, ge=0)
    processes: int | None = Field(None, ge=0)
    disk_bytes: int | None = Field(None, ge=0, description="Of the workspace; measured less often than the rest.")
    gpus: tuple[GpuSample, ...] | None = Field(None, description="Empty: there is none. Null: it is not known.")


class ProcessSeen(Seen):
    """One process of the agent, written when it began, again when it became another program (exec), and when it was gone.

    pid and began_s, to about 20 ms, say which it is. Shorter ones than a look are missed.
    """

    pid: int
    parent: int
    what: Literal["began", "ended", "unseen"] = Field(description="unseen: lost from sight, for one after an attempt.")
    command: str = Field(description="Command line, its beginning; escaped.")
    began_s: float = Field(ge=0, description="Budget used when it began.")
    cpu_s: float | None = None
    exit_code: int | None = Field(None, description="Negative: the signal. Null: nobody but its parent learned it.")


class TrainingPoint(Seen):
    """One logged step of a trainer. Figures by the trainer's own names stand in `more`."""

    source: str = Field(description="`agent.log`, or a file relative to the workspace.")
    trainer: str | None = Field(None, description="Class or kind, where the log tells: SFTTrainer, GRPOTrainer, ...")
    step: int | None = None
    epoch: float | None = None
    loss: float | None = None
    reward: float | None = None
    kl: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    more: dict[str, float] = Field(default_factory=dict)
    not_finite: tuple[str, ...] = Field((), description="Figures, by the trainer's names, that were NaN or infinite.")


class CodeRevision(Seen):
    """One state of the agent's code, a commit of code.git."""

    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    parent: str | None = None
    submission_id: int | None = Field(None, description="It was asked for when this submission was taken in.")
    files: int = Field(0, ge=0)
    changed: int = Field(0, ge=0, description="Files added, changed and removed since the parent.")
    by_hash: int = Field(0, ge=0, description="Files too large or binary, of which only size and hash are kept.")
    left_out: int = Field(0, ge=0, description="Files beyond the limits, of which nothing is kept.")
    by_name: int = Field(0, ge=0, description="Files and folders left out by their names: .git, caches, environments.")
    reason: str | None = Field(None, description="What is not exact about it.")


Observed = Literal[
    "start", "trainer", "steps", "generated", "log", "rows", "loaded", "saved", "lora", "seed", "memory", "crashed", "note"
]  # fmt: skip
"""What the observer tells of a Python process; docs/file-protocol.md has the facts of each. note: a fault of the observer."""


class ObservedFact(Seen):
    """One thing that the observer (recorder/observer/sitecustomize.py) saw inside a Python process of the agent.

    The process wrote it itself, so it may be missing or forged.
    """

    pid: int = Field(ge=0)
    program: str = Field(description="Script, `-m module` or `-c`; its beginning.")
    at_s: float | None = Field(None, description="Unix time by the process's own clock.")
    what: Observed
    facts: dict[str, JsonValue] = Field(default_factory=dict, description="A few small values; see file-protocol.md.")


RECORDED: dict[str, type[Seen]] = {
    "trace": TraceEvent,
    "usage": UsageSample,
    "processes": ProcessSeen,
    "training": TrainingPoint,
    "revisions": CodeRevision,
    "observed": ObservedFact,
    "trajectories": TrajectoryMessage,
}
"""Record types by the name of their file."""

"""What the reference's summarization skill asks of a run: human help, failures that were overcome, how far it came."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from autorl_hpc.records.recorded import ProcessSeen, TraceEvent
from autorl_hpc.report.story import SkillMetrics
from autorl_hpc.report.summary import Point
from autorl_hpc.report.telling.lines import Recorded
from autorl_hpc.report.telling.metrics import INFRASTRUCTURE
from autorl_hpc.states import SubmissionState

SHELL_AGENT = "shell"
"""The agent that is a person."""

ATTACHED = "attach"
"""Events whose names begin so tell that a person looked into the sandbox with a terminal of their own."""

PROGRAMS = ("python", "accelerate", "torchrun", "deepspeed")
"""Whose failing is an attempt that failed; of `grep` a code other than 0 is an answer."""

RUNS_A_PROGRAM = re.compile(
    rf"(?:^|[;&|(\n])\s*(?:\w+=\S*\s+|(?:nohup|time|exec|env|timeout\s+\S+)\s+)*(?:[^\s;&|(]*/)?(?:{'|'.join(PROGRAMS)})"
)
"""A shell's line that starts one of them."""

FIRST_SIGNAL = 128
"""Codes of a shell above it tell of a signal."""

Stage = Literal["none", "design", "implementation", "execution", "evaluation"]


def skill_metrics(
    agent: str,
    points: Sequence[Point],
    recorded: Recorded,
    events: Sequence[Mapping[str, Any]],
    *,
    started: bool,
    said_something: bool,
) -> SkillMetrics:
    """The metrics of one run.

    Args:
        events: lines of events.jsonl.
        started: an attempt began.
        said_something: the agent's log is not empty.
    """
    return SkillMetrics(
        without_human_help=_alone(agent, events, started),
        recovered_from=_recovered(points, recorded) if started else None,
        stage_reached=_stage(points, recorded, said_something),
    )


def _alone(agent: str, events: Sequence[Mapping[str, Any]], started: bool) -> bool | None:
    if not started:
        return None
    if agent == SHELL_AGENT or any(str(event["event"]).startswith(ATTACHED) for event in events):
        return False
    return True if events else None  # without the list of events nobody knows who looked in


def _recovered(points: Sequence[Point], recorded: Recorded) -> int | None:
    """Submissions that were refused or could not be scored, and programs that failed, before the last scored submission.

    None: nobody learned how any program ended. Without a scored submission nothing was recovered from.
    """
    last = max((p.elapsed_s for p in points if p.score is not None), default=None)
    if last is None:
        return 0
    submissions = sum(
        p.elapsed_s < last
        and p.status in (SubmissionState.REFUSED, SubmissionState.FAILED)
        and p.fault not in INFRASTRUCTURE
        for p in points
    )
    programs = _failed_processes([p for p in recorded.processes.records if p.what == "ended" and p.elapsed_s < last])
    if programs is None:
        programs = _failed_calls([e for e in recorded.trace.records if e.elapsed_s < last])
    return None if programs is None else submissions + programs


def _failed_processes(ended: Sequence[ProcessSeen]) -> int | None:
    """None: the exit code of none of the programs is known; where no program ran, of nothing that did."""
    looked_at = [one for one in ended if _is_program(one)] or ended
    return sum(map(failed, looked_at)) if any(one.exit_code is not None for one in looked_at) else None


def _failed_calls(trace: Sequence[TraceEvent]) -> int | None:
    """The same by the results of tool calls, some of which tell no code where all went well."""
    commands = {e.call_id: e.command for e in trace if e.kind == "tool_call" and e.command}
    results = [(e, e.command or commands.get(e.call_id)) for e in trace if e.kind == "tool_result"]
    told = [(e.exit_code or 0, command) for e, command in results if command and (e.exit_code is not None or e.ok)]
    codes = [code for code, command in told if RUNS_A_PROGRAM.search(command)]
    return sum(0 < code <= FIRST_SIGNAL for code in codes) if told else None


def _is_program(process: ProcessSeen) -> bool:
    words = process.command.split(None, 1)
    return bool(words) and words[0].rsplit("/", 1)[-1].startswith(PROGRAMS)


def failed(process: ProcessSeen) -> bool:
    """Whether a program of the agent's ended with an error. A signal is none: agents stop what they started."""
    if process.what != "ended" or process.exit_code is None or process.exit_code <= 0:
        return False
    return _is_program(process)


def _stage(points: Sequence[Point], recorded: Recorded, said_something: bool) -> Stage:
    if any(p.score is not None for p in points):
        return "evaluation"
    if any(p.status is not SubmissionState.REFUSED for p in points) or _trained(recorded):
        return "execution"
    if any(one.files > 0 for one in recorded.revisions.records):
        return "implementation"
    return "design" if said_something or recorded.trace.records or recorded.processes.records else "none"


def _trained(recorded: Recorded) -> bool:
    return any((point.step or 0) > 0 for point in recorded.training.records)

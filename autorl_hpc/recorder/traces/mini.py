"""Parse mini-swe-agent's trajectories (`*.traj.json`, rewritten after each step), and the lines of the suite's agent `mini`.

`mini` prints a trajectory's messages one per line: `{"type": "mini", "session": ..., "message": ...}`. Format
`mini-swe-agent-1.1` has actions and return codes in `extra`; `mini-swe-agent-1` a code block in the answer, the return code
in the next message.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autorl_hpc.recorder.traces.parse import (
    ParsedLine,
    Table,
    beginning,
    command,
    count,
    dollars,
    exit_code,
    length,
    name,
    table,
    tables,
    wall,
)

FORMAT = "mini"
_RETURN_CODE = re.compile(r"\s{0,8}(?:<exception>[^<]{0,500}</exception>\s{0,8})?<returncode>(-?\d{1,5})</returncode>")
_BLOCK = re.compile(r"```(?:bash|mswea_bash_command)\s{0,8}\n([^`]{1,4096})")


def knows(line: Table) -> bool:
    """Return whether a line was written by the suite's agent."""
    return line.get("type") == FORMAT and isinstance(line.get("session"), str)


def read(line: Table) -> list[ParsedLine]:
    """Parse a line: a process's start, a message, or an error after which the agent waited."""
    own, at = name(line.get("session")), wall(line.get("at"))
    if isinstance(line.get("message"), dict):
        return [replace(told, session=own, wall=told.wall or at) for told in read_message(line["message"])]
    if isinstance(line.get("error"), str):
        return [ParsedLine("error", session=own, text=beginning(line["error"]), wall=at)]
    return [ParsedLine("session", session=own, model=name(line.get("model")), wall=at)] if "start" in line else []


def is_document(value: object) -> bool:
    """Return whether it is a trajectory."""
    told = table(value)
    by_name = isinstance(told.get("trajectory_format"), str) and told["trajectory_format"].startswith("mini-swe-agent")
    return isinstance(told.get("messages"), list) and (by_name or "model_stats" in table(told.get("info")))


def session(document: Table) -> str | None:
    """Return what distinguishes a session from the next one in the same file: the id or time of its first answer."""
    for message in tables(document["messages"]):
        extra = table(message.get("extra"))
        first = name(table(extra.get("response")).get("id"))
        at = wall(extra.get("timestamp"))
        if first is not None or at is not None:
            return first or f"{at:.6f}"
    return None


def read_message(message: Table) -> list[ParsedLine]:
    """Parse one message."""
    extra = table(message.get("extra"))
    at = wall(extra.get("timestamp"))
    if message.get("role") == "exit":
        status = extra.get("exit_status")
        return [ParsedLine("end", ok=status == "Submitted", text=beginning(status or message.get("content")), wall=at)]
    found = _usage(extra, at)
    if message.get("role") == "assistant" or message.get("object") == "response":
        return [
            *found,
            ParsedLine("message", chars=length(message.get("content")), wall=at),
            *_calls(message, extra, at),
        ]
    code = exit_code(extra.get("returncode"))
    if code is None and isinstance(message.get("content"), str) and message.get("role") in ("user", "tool"):
        told = _RETURN_CODE.match(message["content"])
        code = int(told[1]) if told else None
    if code is None:
        failed = extra.get("interrupt_type")
        return [*found, ParsedLine("error", text=beginning(failed), wall=at)] if isinstance(failed, str) else found
    said = extra.get("exception_info") or extra.get("raw_output") or message.get("content")
    result = ParsedLine(
        "tool_result",
        call_id=name(message.get("tool_call_id") or message.get("call_id")),
        exit_code=code,
        ok=code == 0,
        text=beginning(said) if code else None,
        wall=at,
    )
    return [*found, result]


def read_totals(document: Table) -> list[ParsedLine]:
    """Return the document's totals of the session: cost and calls, no tokens."""
    stats = table(table(document.get("info")).get("model_stats"))
    told = ParsedLine(
        "usage",
        session=session(document),
        cost_usd=dollars(stats.get("instance_cost")),
        calls=count(stats.get("api_calls")),
        is_total=True,
    )
    return [told] if told.has_figures() else []


def _usage(extra: Table, at: float | None) -> list[ParsedLine]:
    """Parse the usage of one call, of OpenAI's chat completions or responses API."""
    response = table(extra.get("response"))
    usage = table(response.get("usage"))
    details = table(usage.get("prompt_tokens_details")) or table(usage.get("input_tokens_details"))
    by_chat = "prompt_tokens" in usage
    told = ParsedLine(
        "usage",
        call_id=name(response.get("id")),
        model=name(response.get("model")),
        tokens_in=count(usage.get("prompt_tokens" if by_chat else "input_tokens")),
        tokens_out=count(usage.get("completion_tokens" if by_chat else "output_tokens")),
        tokens_cached=count(details.get("cached_tokens")),
        cost_usd=dollars(extra.get("cost")),
        wall=at,
    )
    return [told] if told.has_figures() else []


def _calls(message: Table, extra: Table, at: float | None) -> list[ParsedLine]:
    actions = extra.get("actions")
    if isinstance(actions, list):
        return [
            ParsedLine(
                "tool_call", call_id=name(each.get("tool_call_id")), tool="bash", command=command("bash", each), wall=at
            )
            for each in tables(actions)
        ]
    content = message.get("content")
    block = _BLOCK.search(content[:100_000]) if isinstance(content, str) else None
    return [ParsedLine("tool_call", tool="bash", command=beginning(block[1]), wall=at)] if block else []

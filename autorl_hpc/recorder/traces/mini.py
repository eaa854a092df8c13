"""Parse mini-swe-agent's trajectories (`*.traj.json`, rewritten after each step), and the lines of the suite's agent `mini`.

`mini` prints a trajectory's messages one per line: `{"type": "mini", "session": ..., "message": ...}`. Actions and return
codes are in `extra`.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "mini"


def knows(line: Table) -> bool:
    return line.get("type") == FORMAT and isinstance(line.get("session"), str)


def read(line: Table) -> list[Event]:
    if isinstance(line.get("message"), dict):
        found = read_message(line["message"])
    elif isinstance(line.get("error"), str):
        found = [parse.event("error", text=line["error"])]
    else:
        found = [parse.event("session", model=line.get("model"))] if "start" in line else []
    return parse.with_fields(found, session=line.get("session"), wall=line.get("at"))


def is_document(value: object) -> bool:
    form = parse.within(value, "trajectory_format")
    by_name = isinstance(form, str) and form.startswith("mini-swe-agent")
    by_name = by_name or "model_stats" in parse.table(parse.within(value, "info"))
    return isinstance(parse.within(value, "messages"), list) and by_name


def session(document: Table) -> str | None:
    """Return what distinguishes a session from the next one in the same file: the id or time of its first answer."""
    for message in parse.tables(document["messages"]):
        extra = parse.table(message.get("extra"))
        first, at = parse.name(parse.within(extra, "response", "id")), parse.wall(extra.get("timestamp"))
        if first is not None or at is not None:
            return first or f"{at:.6f}"
    return None


def read_message(message: Table) -> list[Event]:
    extra = parse.table(message.get("extra"))
    return parse.with_fields(_message(message, extra, message.get("content")), wall=extra.get("timestamp"))


def _message(message: Table, extra: Table, content: object) -> list[Event]:
    role = message.get("role")
    if role == "exit":
        status = extra.get("exit_status")
        return [parse.event("end", ok=status == "Submitted", text=status or content)]
    found = _usage(extra)
    if role == "assistant" or message.get("object") == "response":
        return [*found, parse.message(parse.text_of(content)), *_calls(extra)]
    code = parse.exit_code(extra.get("returncode"))
    if code is not None:
        said = extra.get("exception_info") or extra.get("raw_output") or content
        call_id = message.get("tool_call_id") or message.get("call_id")
        return [*found, {**parse.result(code != 0, said, call_id=call_id, exit_code=code), "output": content or said}]
    failed = extra.get("interrupt_type")
    told = parse.message(parse.text_of(content), "system" if role == "system" else "user")
    return [*found, *([parse.event("error", text=failed)] if isinstance(failed, str) else []), told]


def read_totals(document: Table) -> list[Event]:
    stats = parse.table(parse.within(document, "info", "model_stats"))
    cost, calls = stats.get("instance_cost"), stats.get("api_calls")
    return parse.usage(session=session(document), cost_usd=cost, calls=calls, is_total=True)


def _usage(extra: Table) -> list[Event]:
    response = parse.table(extra.get("response"))
    tokens = parse.table(response.get("usage"))
    given, made = ("prompt", "completion") if "prompt_tokens" in tokens else ("input", "output")
    return parse.usage(
        **{"call_id": response.get("id"), "model": response.get("model"), "cost_usd": extra.get("cost")},
        tokens_in=tokens.get(f"{given}_tokens"),
        tokens_out=tokens.get(f"{made}_tokens"),
        tokens_cached=parse.within(tokens, f"{given}_tokens_details", "cached_tokens"),
    )


def _calls(extra: Table) -> list[Event]:
    calls = parse.tables(extra.get("actions"))
    made = (parse.call("bash", each, call_id=each.get("tool_call_id")) for each in calls)
    return [{**call, "input": each.get("command")} for each, call in zip(calls, made, strict=True)]

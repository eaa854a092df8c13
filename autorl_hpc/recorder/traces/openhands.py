"""Parse traces of OpenHands: `--headless --json` (SDK 1.x, by `kind`) and earlier versions (by `action` and `observation`).

Events of 1.x carry no tokens; these are in `base_state.json` of the conversation's folder. Earlier events carry the
session's totals so far in `llm_metrics`, and a whole session is written to a trajectory, a list of such events.
"""

from __future__ import annotations

from typing import Any

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import MAX_USD, Event, Table

FORMAT = "openhands"
_RUN = (*("run", "run_ipython", "write", "edit", "read"), *("browse", "browse_interactive", "call_tool_mcp", "mcp"))
_RESULT = (*_RUN, "error", "user_rejected")


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    kind = line.get("kind")
    if isinstance(kind, str):
        return kind.endswith("Event") or kind == "UserRejectObservation"
    if line.get("type") in ("action", "observation"):
        return True
    named = isinstance(line.get("action"), str) or isinstance(line.get("observation"), str)
    return named and "source" in line and "id" in line


def is_state(value: object) -> bool:
    """Return whether it is a base_state.json."""
    return isinstance(parse.within(value, "stats", "usage_to_metrics"), dict)


def read(line: Table) -> list[Event]:
    """Parse a line."""
    found = _event(line) if isinstance(line.get("kind"), str) else _earlier(line)
    metrics = line.get("llm_metrics")
    return parse.with_fields(found, wall=line.get("timestamp")) + (
        _metrics([metrics]) if isinstance(metrics, dict) else []
    )


def read_state(state: Table) -> list[Event]:
    """Return the totals of a base_state.json."""
    by_use = parse.tables(list(parse.table(parse.within(state, "stats", "usage_to_metrics")).values()))
    return parse.with_fields(_metrics(by_use), session=state.get("id"))


def _metrics(by_use: list[Table]) -> list[Event]:
    """Add up the totals of all models of a session. Prompt tokens include cached ones."""

    def tokens(key: str) -> int | None:
        return parse.total(*(parse.within(each, "accumulated_token_usage", key) for each in by_use))

    costs = [cost for each in by_use if (cost := parse.real(each.get("accumulated_cost"), MAX_USD)) is not None]
    calls = [len(each["token_usages"]) for each in by_use if isinstance(each.get("token_usages"), list)]
    models = {
        model
        for each in by_use
        if (model := parse.name(parse.within(each, "accumulated_token_usage", "model"))) is not None
    }
    return parse.usage(
        model=models.pop() if len(models) == 1 else None,
        tokens_in=tokens("prompt_tokens"),
        tokens_out=tokens("completion_tokens"),
        tokens_cached=tokens("cache_read_tokens"),
        cost_usd=sum(costs) if costs else None,
        calls=parse.total(*calls) or None,  # a snapshot has no list
        is_total=True,
    )


def _event(line: Table) -> list[Event]:
    """Parse an event of SDK 1.x."""
    kind, tool = line["kind"], line.get("tool_name")
    fields = {"call_id": line.get("tool_call_id"), "tool": tool}
    if kind == "ActionEvent":
        action = parse.table(line.get("action"))
        if tool == "finish":
            return [parse.event("end", ok=True, text=action.get("message"))]
        if tool == "think":
            return [parse.event("message", chars=action.get("thought"))]
        return [_call(action, fields)]
    if kind == "ObservationEvent":
        return [] if tool in ("finish", "think") else [_observed(parse.table(line.get("observation")), fields)]
    if kind in ("AgentErrorEvent", "UserRejectObservation"):
        return [parse.result(True, line.get("error") or line.get("rejection_reason"), **fields)]
    if kind == "MessageEvent" and line.get("source") == "agent":
        content = parse.within(line, "llm_message", "content")
        texts = (each["text"] for each in parse.tables(content) if isinstance(each.get("text"), str))
        return [parse.event("message", chars=content if isinstance(content, str) else "".join(texts))]
    if kind == "ConversationErrorEvent":
        return [parse.event("error", text=f"{parse.name(line.get('code'))}: {line.get('detail')}")]
    if kind == "ConversationStateUpdateEvent":
        value = parse.table(line.get("value"))
        return read_state({"stats": value} if line.get("key") == "stats" else value)
    return []


def _call(action: Table, fields: Table) -> Event:
    """Return a tool call. The editor's `command` is only a word such as `create`, so its path is added."""
    if not isinstance(action.get("path"), str):
        return parse.call(fields["tool"], action, call_id=fields["call_id"])
    does = action.get("command")
    return parse.event("tool_call", command=None if does == "view" else f"{does} {action['path']}", **fields)


def _observed(observation: Table, fields: Table) -> Event:
    code = _code(observation.get("exit_code"), parse.within(observation, "metadata", "exit_code"))
    content = observation.get("content") or observation.get("output")
    texts = (each.get("text") for each in parse.tables(content) if each.get("text"))
    said = content if isinstance(content, str) else next(texts, None)
    return parse.result(observation.get("is_error") is True or bool(code), said, exit_code=code, **fields)


def _code(*values: Any) -> int | None:
    return next((code for value in values if (code := parse.exit_code(value)) is not None), None)


def _earlier(line: Table) -> list[Event]:
    """Parse an event by `action` and `observation`, and the documented `--json` lines, whose fields are not nested."""
    args, extras = parse.table(line.get("args")) or line, parse.table(line.get("extras"))
    action, observation, content = line.get("action"), line.get("observation"), line.get("content")
    if isinstance(action, str) and line.get("type") != "observation":
        if action in _RUN:
            return [parse.call(action, args, call_id=line.get("id"))]
        if action == "message" and line.get("source") == "agent":
            return [parse.event("message", chars=args.get("content"))]
        if action in ("finish", "reject"):
            said = args.get("final_thought") or line.get("message")
            return [parse.event("end", ok=action == "finish", text=said)]
    elif observation in _RESULT or line.get("type") == "observation":
        metadata = parse.within(extras, "metadata", "exit_code")
        code = _code(metadata, extras.get("exit_code"), line.get("exit_code"))
        failed = observation in ("error", "user_rejected") or bool(code)
        return [parse.result(failed, content or line.get("message"), call_id=line.get("cause"), exit_code=code)]
    elif observation == "agent_state_changed" and extras.get("agent_state") == "error":
        return [parse.event("error", text=extras.get("reason") or content)]
    return []

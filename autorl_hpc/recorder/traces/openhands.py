"""Parse traces of OpenHands: `--headless --json` (SDK 1.x, by `kind`) and earlier versions (by `action` and `observation`).

Events of 1.x carry no tokens; these are in `base_state.json` of the conversation's folder. Earlier events carry the
session's totals so far in `llm_metrics`, and a whole session is written to a trajectory, a list of such events.
"""

from __future__ import annotations

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
    total,
    wall,
)

FORMAT = "openhands"
_RUN = (
    "run",
    "run_ipython",
    "write",
    "edit",
    "read",
    "browse",
    "browse_interactive",
    "call_tool_mcp",
    "mcp",
)
_RESULT = (*_RUN, "error", "user_rejected")


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    kind = line.get("kind")
    if isinstance(kind, str):
        return kind.endswith("Event") or kind == "UserRejectObservation"
    if line.get("type") in ("action", "observation"):
        return True
    told = isinstance(line.get("action"), str) or isinstance(line.get("observation"), str)
    return told and "source" in line and "id" in line


def is_state(value: object) -> bool:
    """Return whether it is a base_state.json."""
    return isinstance(table(table(value).get("stats")).get("usage_to_metrics"), dict)


def read(line: Table) -> list[ParsedLine]:
    """Parse a line."""
    found = _event(line) if isinstance(line.get("kind"), str) else _earlier(line)
    return (
        [*found, *_metrics([table(line["llm_metrics"])], None)] if isinstance(line.get("llm_metrics"), dict) else found
    )


def read_state(state: Table) -> list[ParsedLine]:
    """Return the totals of a base_state.json."""
    by_use = tables(list(table(table(state.get("stats")).get("usage_to_metrics")).values()))
    return _metrics(by_use, name(state.get("id")))


def _metrics(by_use: list[Table], session: str | None) -> list[ParsedLine]:
    """Add up the totals of all models of a session. Prompt tokens include cached ones."""
    tokens = [table(each.get("accumulated_token_usage")) for each in by_use]
    costs = [cost for each in by_use if (cost := dollars(each.get("accumulated_cost"))) is not None]
    calls = [len(each["token_usages"]) for each in by_use if isinstance(each.get("token_usages"), list)]
    models = {model for each in tokens if (model := name(each.get("model"))) is not None}
    told = ParsedLine(
        "usage",
        session=session,
        model=models.pop() if len(models) == 1 else None,
        tokens_in=total(*(count(each.get("prompt_tokens")) for each in tokens)),
        tokens_out=total(*(count(each.get("completion_tokens")) for each in tokens)),
        tokens_cached=total(*(count(each.get("cache_read_tokens")) for each in tokens)),
        cost_usd=dollars(sum(costs)) if costs else None,
        calls=total(*calls) or None,  # a snapshot has no list
        is_total=True,
    )
    return [told] if told.has_figures() else []


def _event(line: Table) -> list[ParsedLine]:
    """Parse an event of SDK 1.x."""
    kind, at = line.get("kind"), wall(line.get("timestamp"))
    call, tool = name(line.get("tool_call_id")), name(line.get("tool_name"))
    if kind == "ActionEvent":
        action = table(line.get("action"))
        if tool == "finish":
            return [ParsedLine("end", ok=True, text=beginning(action.get("message")), wall=at)]
        if tool == "think":
            return [ParsedLine("message", chars=length(action.get("thought")), wall=at)]
        writes = None if action.get("command") == "view" else _written(tool, action)
        return [ParsedLine("tool_call", call_id=call, tool=tool, command=writes, wall=at)]
    if kind == "ObservationEvent":
        return [] if tool in ("finish", "think") else [_observed(table(line.get("observation")), call, tool, at)]
    if kind in ("AgentErrorEvent", "UserRejectObservation"):
        said = beginning(line.get("error") or line.get("rejection_reason"))
        return [ParsedLine("tool_result", call_id=call, tool=tool, ok=False, text=said, wall=at)]
    if kind == "MessageEvent" and line.get("source") == "agent":
        return [ParsedLine("message", chars=_chars(table(line.get("llm_message")).get("content")), wall=at)]
    if kind == "ConversationErrorEvent":
        return [
            ParsedLine("error", text=beginning(f"{name(line.get('code'))}: {beginning(line.get('detail'))}"), wall=at)
        ]
    if kind == "ConversationStateUpdateEvent":
        value = table(line.get("value"))
        return read_state({"stats": value} if line.get("key") == "stats" else value)
    return []


def _written(tool: str | None, action: Table) -> str | None:
    """Return what a tool call writes: the editor's `command` is only a word such as `create`, so its path is added."""
    path = action.get("path")
    return beginning(f"{action.get('command')} {path}") if isinstance(path, str) else command(tool, action)


def _observed(observation: Table, call: str | None, tool: str | None, at: float | None) -> ParsedLine:
    code = exit_code(observation.get("exit_code"))
    code = exit_code(table(observation.get("metadata")).get("exit_code")) if code is None else code
    failed = observation.get("is_error") is True or bool(code)
    content = observation.get("content") or observation.get("output")
    said = (
        content if isinstance(content, str) else next((e.get("text") for e in tables(content) if e.get("text")), None)
    )
    return ParsedLine(
        "tool_result",
        call_id=call,
        tool=tool,
        exit_code=code,
        ok=not failed,
        text=beginning(said) if failed else None,
        wall=at,
    )


def _chars(content: object) -> int:
    return length(content) or sum(length(each.get("text")) for each in tables(content))


def _earlier(line: Table) -> list[ParsedLine]:
    """Parse an event by `action` and `observation`, and the documented `--json` lines, whose fields are not nested."""
    at, args = wall(line.get("timestamp")), table(line.get("args")) or line
    action, observation = line.get("action"), line.get("observation")
    if isinstance(action, str) and line.get("type") != "observation":
        if action in _RUN:
            told = command(action, args)
            return [ParsedLine("tool_call", call_id=name(line.get("id")), tool=action, command=told, wall=at)]
        if action == "message" and line.get("source") == "agent":
            return [ParsedLine("message", chars=length(args.get("content")), wall=at)]
        if action in ("finish", "reject"):
            said = args.get("final_thought") or line.get("message")
            return [ParsedLine("end", ok=action == "finish", text=beginning(said), wall=at)]
        return []
    if observation in _RESULT or line.get("type") == "observation":
        return [_seen(line, at)]
    if observation == "agent_state_changed" and table(line.get("extras")).get("agent_state") == "error":
        return [
            ParsedLine("error", text=beginning(table(line.get("extras")).get("reason") or line.get("content")), wall=at)
        ]
    return []


def _seen(line: Table, at: float | None) -> ParsedLine:
    extras = table(line.get("extras"))
    code = exit_code(table(extras.get("metadata")).get("exit_code"))
    for given in (extras.get("exit_code"), line.get("exit_code")):
        code = exit_code(given) if code is None else code
    failed = line.get("observation") in ("error", "user_rejected") or bool(code)
    return ParsedLine(
        "tool_result",
        call_id=name(line.get("cause")),
        exit_code=code,
        ok=not failed,
        text=beginning(line.get("content") or line.get("message")) if failed else None,
        wall=at,
    )

"""Parse traces of OpenHands: `--headless --json` (SDK 1.x).

Events carry no tokens; these are in `base_state.json` of the conversation's folder.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import MAX_USD, Event, Table

FORMAT = "openhands"


def knows(line: Table) -> bool:
    kind = line.get("kind")
    return isinstance(kind, str) and (kind.endswith("Event") or kind == "UserRejectObservation")


def is_state(value: object) -> bool:
    return isinstance(parse.within(value, "stats", "usage_to_metrics"), dict)


def read(line: Table) -> list[Event]:
    return parse.with_fields(_event(line), wall=line.get("timestamp"))


def read_state(state: Table) -> list[Event]:
    by_use = parse.tables(list(parse.table(parse.within(state, "stats", "usage_to_metrics")).values()))
    return parse.with_fields(_metrics(by_use), session=state.get("id"))


def _metrics(by_use: list[Table]) -> list[Event]:
    def tokens(key: str) -> int | None:
        return parse.total(*(parse.within(each, "accumulated_token_usage", key) for each in by_use))

    costs = [cost for each in by_use if (cost := parse.real(each.get("accumulated_cost"), MAX_USD)) is not None]
    calls = [len(each["token_usages"]) for each in by_use if isinstance(each.get("token_usages"), list)]
    named = (parse.name(parse.within(each, "accumulated_token_usage", "model")) for each in by_use)
    models = {model for model in named if model is not None}
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
    kind, tool = line["kind"], line.get("tool_name")
    fields = {"call_id": line.get("tool_call_id"), "tool": tool}
    if kind == "ActionEvent":
        action = parse.table(line.get("action"))
        if tool == "finish":
            return [parse.event("end", ok=True, text=action.get("message"))]
        if tool == "think":
            return [parse.message(action.get("thought"), "thought")]
        thoughts = (line.get("reasoning_content"), parse.text_of(line.get("thought")))
        return [*(parse.message(each, "thought") for each in thoughts if each), _call(action, fields)]
    if kind == "ObservationEvent":
        return [] if tool in ("finish", "think") else [_observed(parse.table(line.get("observation")), fields)]
    if kind in ("AgentErrorEvent", "UserRejectObservation"):
        return [parse.result(True, line.get("error") or line.get("rejection_reason"), **fields)]
    if kind == "MessageEvent":
        said = parse.text_of(parse.within(line, "llm_message", "content"))
        return [parse.message(said, "assistant" if line.get("source") == "agent" else "user")]
    if kind == "ConversationErrorEvent":
        return [parse.event("error", text=f"{parse.name(line.get('code'))}: {line.get('detail')}")]
    if kind == "ConversationStateUpdateEvent":
        value = parse.table(line.get("value"))
        return read_state({"stats": value} if line.get("key") == "stats" else value)
    return []


def _call(action: Table, fields: Table) -> Event:
    """Return a tool call. The editor's `command` is only a word such as `create`, so its path is added."""
    given = {key: value for key, value in action.items() if key != "kind"}
    if not isinstance(action.get("path"), str):
        return parse.call(fields["tool"], given, call_id=fields["call_id"])
    does = action.get("command")
    call = parse.event("tool_call", command=None if does == "view" else f"{does} {action['path']}", **fields)
    return {**call, "input": given}


def _observed(observation: Table, fields: Table) -> Event:
    code = parse.exit_code(observation.get("exit_code"))
    code = parse.exit_code(parse.within(observation, "metadata", "exit_code")) if code is None else code
    content = observation.get("content") or observation.get("output")
    failed = observation.get("is_error") is True or bool(code)
    return parse.result(failed, parse.text_of(content), exit_code=code, **fields)

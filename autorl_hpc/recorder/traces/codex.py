"""Parse traces of Codex: `codex exec --json`, one JSON object per line.

`turn.completed` carries the thread's tokens so far, which a resumed thread continues, not those of the turn. Item ids start
again in each process, so they are unique only between two `thread.started`.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "codex"
_TYPES = (
    *("thread.started", "turn.started", "turn.completed", "turn.failed"),
    *("item.started", "item.updated", "item.completed"),
)
_INPUTS = ("command", "arguments", "changes", "query", "prompt")
_TOOLS = ("command_execution", "file_change", "mcp_tool_call", "collab_tool_call", "web_search")


def knows(line: Table) -> bool:
    return line.get("type") in _TYPES or (line.get("type") == "error" and set(line) == {"type", "message"})


def read(line: Table) -> list[Event]:
    kind = line.get("type")
    if kind == "thread.started":
        return [parse.event("session", session=line.get("thread_id"))]
    if kind in ("item.started", "item.completed"):
        return _item(parse.table(line.get("item")), done=kind == "item.completed")
    if kind == "turn.completed":
        # Input includes cached tokens, output includes reasoning.
        fields = {"tokens_in": "input_tokens", "tokens_out": "output_tokens", "tokens_cached": "cached_input_tokens"}
        figures = {field: parse.within(line.get("usage"), key) for field, key in fields.items()}
        return [*parse.usage(**figures, is_total=True), parse.event("end", ok=True)]
    if kind == "turn.failed":
        return [parse.event("end", ok=False, text=parse.within(line, "error", "message"))]
    return [parse.event("error", text=line.get("message"))] if kind == "error" else []


def _item(item: Table, *, done: bool) -> list[Event]:
    kind = item.get("type")
    if kind in ("agent_message", "reasoning") and done:
        return [parse.message(item.get("text"), "assistant" if kind == "agent_message" else "thought")]
    if kind == "error" and done:
        return [parse.event("error", text=item.get("message"))]
    if kind not in _TOOLS:
        return []
    made = parse.call(parse.name(item.get("tool")) or kind, item, call_id=item.get("id"))
    made["input"] = {key: item[key] for key in _INPUTS if key in item}
    if kind == "file_change":
        changes = parse.tables(item.get("changes"))[:50]
        command = " ".join(f"{parse.name(e.get('kind'))} {parse.name(e.get('path'))}" for e in changes)
        made |= {"command": parse.beginning(command)} if changes else {}
    if not done:
        return [made]
    code = parse.exit_code(item.get("exit_code"))
    failed = item.get("status") in ("failed", "declined") or bool(code)
    answer = parse.text_of(parse.within(item, "result", "content"))
    said = parse.within(item, "error", "message") or item.get("aggregated_output") or answer
    return [{**made, **parse.result(failed, said, exit_code=code)}]

"""Parse traces of Claude Code: `claude -p --output-format stream-json --verbose`, one JSON object per line.

A response comes in several `assistant` lines, one per content block, with the same message id and usage, whose output
tokens are not final. The `result` line has the totals of all models, including subagents. In a resumed session some
versions continue the earlier totals and some start again; the sum of the calls shows which.
"""

from __future__ import annotations

import re

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "claude-code"
_EXIT = re.compile(r"\s{0,8}Exit code (\d{1,3})\b")
_SYNTHETIC = "<synthetic>"  # model name of lines that the program itself wrote, for example on an API error


def knows(line: Table) -> bool:
    kind = line.get("type")
    if "session_id" not in line:
        return False
    if kind in ("assistant", "user"):
        return isinstance(line.get("message"), dict)
    return (kind == "system" and "subtype" in line) or (kind == "result" and "num_turns" in line)


def read(line: Table) -> list[Event]:
    read_kind = {"system": _system, "assistant": _assistant, "user": _results, "result": _result}[line["type"]]
    return parse.with_fields(read_kind(line), session=line.get("session_id"))


def _system(line: Table) -> list[Event]:
    if line.get("subtype") == "init":
        return [parse.event("session", model=line.get("model"))]
    if line.get("subtype") == "api_retry":
        status, error = line.get("error_status"), line.get("error")
        said = error if isinstance(error, str) and error.strip() else "retried"
        return [parse.event("error", text=f"{said} (HTTP {parse.name(status)})" if isinstance(status, int) else said)]
    return []


def _assistant(line: Table) -> list[Event]:
    message = parse.table(line.get("message"))
    found = []
    if message.get("model") != _SYNTHETIC:
        found += parse.usage(**_tokens(message.get("usage")), model=message.get("model"), call_id=message.get("id"))
    for block in parse.tables(message.get("content")):
        if block.get("type") == "tool_use":
            found.append(parse.call(block.get("name"), block.get("input"), call_id=block.get("id")))
        elif block.get("type") in ("text", "thinking"):
            role = "assistant" if block["type"] == "text" else "thought"
            found.append(parse.message(block.get(block["type"]), role))
    return [*found, parse.event("error", text=line["error"])] if isinstance(line.get("error"), str) else found


def _tokens(figures: object) -> Table:
    """Return the usage of one call. `input_tokens` excludes cached tokens; cache reads and writes are added."""
    cached = parse.within(figures, "cache_read_input_tokens")
    others = (parse.within(figures, key) for key in ("input_tokens", "cache_creation_input_tokens"))
    return {
        "tokens_in": parse.total(cached, *others),
        "tokens_out": parse.within(figures, "output_tokens"),
        "tokens_cached": cached,
    }


def _results(line: Table) -> list[Event]:
    if line.get("isReplay") is True:
        return []
    content = parse.within(line, "message", "content")
    found = [parse.message(content, "user")] if isinstance(content, str) else []
    for block in parse.tables(content):
        if block.get("type") == "text":
            found.append(parse.message(block.get("text"), "user"))
        if block.get("type") == "tool_result":
            failed, said = block.get("is_error") is True, parse.text_of(block.get("content"))
            code = _EXIT.match(said) if failed and said else None
            exit_code, call_id = int(code[1]) if code else None, block.get("tool_use_id")
            found.append(parse.result(failed, said, call_id=call_id, exit_code=exit_code, wall=line.get("timestamp")))
    return found


def _result(line: Table) -> list[Event]:
    models = [each for each in parse.table(line.get("modelUsage")).values() if isinstance(each, dict)]
    figures = _of_models(models) if models else _tokens(line.get("usage"))
    failed = line.get("is_error") is True or (parse.name(line.get("subtype")) or "").startswith("error")
    errors = [each for each in line["errors"] if isinstance(each, str)] if isinstance(line.get("errors"), list) else []
    said = line.get("result") or "; ".join(errors[:20]) or line.get("subtype")
    return [
        *parse.usage(**figures, cost_usd=line.get("total_cost_usd"), is_total=True),
        parse.event("end", ok=not failed, text=said),
    ]


def _of_models(models: list[Table]) -> Table:
    given = ("cacheReadInputTokens", "inputTokens", "cacheCreationInputTokens")
    return {
        "tokens_in": parse.total(*(each.get(key) for each in models for key in given)),
        "tokens_out": parse.total(*(each.get("outputTokens") for each in models)),
        "tokens_cached": parse.total(*(each.get("cacheReadInputTokens") for each in models)),
    }

"""Plain requests of the dialects, into which tests put what they are about."""

from __future__ import annotations

from typing import Any

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Allowed

NOTHING = Allowed(())
FUNCTION = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"url": {}}}}}


def user(content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def item(*items: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items)}


def parts(*given: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": list(given)}]}


PLAIN = {CHAT: user("x"), RESPONSES: {"model": "m", "input": "x"}, ANTHROPIC: user("x"), GEMINI: parts({"text": "x"})}

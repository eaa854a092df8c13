"""Plain requests of the dialects, into which tests put what they are about."""

from __future__ import annotations

import json
from typing import Any

from autorl_hpc.gateway.request import Allowed

NOTHING = Allowed(())
DATA_URL = "data:image/png;base64,iVBORw0KGgo="
FUNCTION = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"url": {}}}},
}


def user(content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def item(*items: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items)}


def parts(*given: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": list(given)}]}


def named(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]}-{json.dumps(case[1])[:70]}"

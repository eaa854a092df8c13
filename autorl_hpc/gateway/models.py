"""The list of models, which the gateway gives itself: the run's driver is the only one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autorl_hpc.gateway.refusals import GEMINI, Refusal


def listing(dialect: str, headers: Mapping[str, str], model: str, asked: str | None) -> bytes:
    """The list, or the one model that was asked for.

    Raises:
        Refusal: there is no such model.
    """
    if asked is not None and asked != model:
        raise Refusal(
            404, "model_not_found", f"the model {asked[:80]!r} does not exist here; this run's driver is {model!r}"
        )
    one: dict[str, Any]
    if dialect == GEMINI:
        methods = ["generateContent", "streamGenerateContent", "countTokens"]
        one = {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}
        whole: dict[str, Any] = {"models": [one]}
    elif "anthropic-version" in headers:
        one = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        whole = {"data": [one], "has_more": False, "first_id": model, "last_id": model}
    else:
        one = {"id": model, "object": "model", "created": 0, "owned_by": "driver"}
        whole = {"object": "list", "data": [one]}
    return json.dumps(whole if asked is None else one).encode()

"""What the gateway itself answers, in the words of the client's dialect."""

from __future__ import annotations

import json
from typing import Any, Final

CHAT: Final = "openai-chat"
RESPONSES: Final = "openai-responses"
ANTHROPIC: Final = "anthropic"
GEMINI: Final = "gemini"
DIALECTS: Final = (CHAT, RESPONSES, ANTHROPIC, GEMINI)

OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES: Final = {**OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
GEMINI_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "INVALID_ARGUMENT",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

PASSING: Final = frozenset((429, 502, 503, 504))
"""Of our own: the same request may be answered later."""


class Refusal(Exception):
    """The gateway answers in the driver's place.

    Args:
        status: HTTP's.
        code: a stable word for programs: `budget_exhausted`, `driver_closed`, `hosted_tool`, ...
        message: for the client, most often an LLM.
        retry_after_s: sent where the client should come again.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered later."""
        return self.status in PASSING

    def body(self, dialect: str) -> bytes:
        """JSON as the dialect's provider words errors."""
        return json.dumps(_error(dialect, self.status, self.code, self.message)).encode()

    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what the providers' own client libraries go by."""
        told = {
            "Content-Type": "application/json",
            "x-autorl-refused": self.code,
            "x-should-retry": "true" if self.passing else "false",
        }
        if self.retry_after_s is not None:
            told["Retry-After"] = str(self.retry_after_s)
        return told


def _error(dialect: str, status: int, code: str, message: str) -> dict[str, Any]:
    if dialect == ANTHROPIC:
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}
    if dialect == GEMINI:
        word = GEMINI_STATUS.get(status, "INTERNAL")
        reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code, "domain": "autorl-hpc"}
        return {"error": {"code": status, "message": message, "status": word, "details": [reason]}}
    return {
        "error": {"message": message, "type": OPENAI_TYPES.get(status, "server_error"), "param": None, "code": code}
    }

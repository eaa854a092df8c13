"""Hold the gateway's settings (one JSON line on standard input: they have a token and maybe a key), its refusals in each
provider's wording, the allowed routes, and `Allowed` (hosted tools)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import AliasChoices, Field

from autorl_hpc.records.base import Strict
from autorl_hpc.records.entries import DriverUse


class Upstream(Strict):
    """One of `url` and `endpoint_file`, which holds the current one."""

    url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$", description="With `/v1`, without what follows.")
    endpoint_file: Path | None = None
    key_file: Path | None = None
    key: str | None = Field(None, repr=False)
    proxy: str | None = Field(None, repr=False, description="An HTTP proxy; not used for this machine itself.")
    timeout_s: float = Field(600.0, gt=0, description="Longest silence; drivers that reason are silent for minutes.")
    retries: int = Field(3, ge=0, description="How often a driver that can't be reached is tried again.")


class Prices(Strict):
    """Dollars per million tokens. Without a price for cached input it costs as much as other input."""

    price_in: float = Field(ge=0, validation_alias=AliasChoices("price_in", "in"))
    price_out: float = Field(ge=0, validation_alias=AliasChoices("price_out", "out"))
    price_cached: float | None = Field(None, ge=0, validation_alias=AliasChoices("price_cached", "cached"))


class RunLimits(Strict):
    """Limits of the run over all attempts; None means no limit."""

    tokens: int | None = Field(None, ge=0, description="In and out, cached input among them.")
    cost_usd: float | None = Field(None, ge=0)


class Settings(Strict):
    """Settings of one gateway. Sockets in `listening` already listen, the port's first; they outlive this process."""

    unix: Path | None = None
    port: int | None = Field(None, ge=0, le=65535, description="On the loopback; 0: a free one.")
    listening: tuple[int, ...] = ()
    token: str = Field(min_length=16, repr=False, description="What clients send as their key.")
    upstream: Upstream
    model: str = Field(min_length=1, description="The only one that may be used.")
    prices: Prices | None = None
    limits: RunLimits | None = None
    used: DriverUse = Field(DriverUse(), description="As last reported to the supervisor; counts if `log` has less.")
    log: Path
    bodies: Path | None = Field(None, description="Folder for request and answer bodies; null: they are not stored.")
    tools: tuple[str, ...] = Field((), description="Hosted tools, fields and `remote_urls` that are allowed.")
    attempt: int = Field(1, ge=1)
    elapsed_s: float = Field(0.0, ge=0, description="At the start of this process, for the log.")
    max_output_tokens: int | None = Field(None, ge=1, description="Of an answer whose request sets no limit.")


# --- refusals: the gateway's own answers, in the wording of the client's dialect

CHAT: Final = "openai-chat"
RESPONSES: Final = "openai-responses"
ANTHROPIC: Final = "anthropic"
GEMINI: Final = "gemini"
DIALECTS: Final = (CHAT, RESPONSES, ANTHROPIC, GEMINI)

_INVALID: Final = ("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")
ERROR_TYPES: Final = {
    400: _INVALID,
    401: ("authentication_error", "authentication_error", "UNAUTHENTICATED"),
    403: ("permission_error", "permission_error", "PERMISSION_DENIED"),
    404: ("not_found_error", "not_found_error", "NOT_FOUND"),
    405: _INVALID,
    413: ("invalid_request_error", "request_too_large", "INVALID_ARGUMENT"),
    415: _INVALID,
    429: ("rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    503: ("server_error", "overloaded_error", "UNAVAILABLE"),
    504: ("server_error", "timeout_error", "DEADLINE_EXCEEDED"),
}
"""By status: the type of an error in OpenAI's, Anthropic's and Gemini's wording."""

PASSING: Final = frozenset((429, 502, 503, 504))  # statuses of ours after which the same request may be answered later


class Refusal(Exception):
    """An answer of the gateway in place of the driver's, with a stable word for programs, such as `budget_exhausted`, and a message
    for the client, usually an LLM."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s
        self.passing = status in PASSING

    def body(self, dialect: str) -> bytes:
        """Return JSON in the wording of the dialect's provider."""
        openai, anthropic, gemini = ERROR_TYPES.get(self.status, ("server_error", "api_error", "INTERNAL"))
        error: dict[str, Any] = {"message": self.message}
        if dialect == ANTHROPIC:
            return json.dumps({"type": "error", "error": {**error, "type": anthropic}}).encode()
        if dialect == GEMINI:
            kind = "type.googleapis.com/google.rpc.ErrorInfo"
            details = [{"@type": kind, "reason": self.code, "domain": "autorl-hpc"}]
            error |= {"code": self.status, "status": gemini, "details": details}
        else:
            error |= {"type": openai, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self) -> dict[str, str]:
        """Return the headers; the providers' client libraries obey `x-should-retry`."""
        made = {"Content-Type": "application/json", "x-autorl-refused": self.code}
        made["x-should-retry"] = "true" if self.passing else "false"
        if self.retry_after_s is not None:
            made["Retry-After"] = str(self.retry_after_s)
        return made


def unreadable(why: str) -> Refusal:
    """Return the refusal of a request that two readers may read differently."""
    return Refusal(400, "unreadable", f"the driver's gateway can't read this request: {why}")


# --- routes: only listed paths pass, compared undecoded: no dots, encoded characters, double slashes, absolute addresses

Kind = Literal["generate", "count", "models"]

_PLAIN = re.compile(r"(?:/(?!\.*(?:/|\Z))[A-Za-z0-9._:@-]+)+\Z")
_GEMINI = re.compile(r"/v1beta(?P<path>/models/(?P<model>[A-Za-z0-9._@/-]+):(?P<verb>\w+))\Z")
_VERBS: dict[str, Kind] = {"generateContent": "generate", "streamGenerateContent": "generate", "countTokens": "count"}
_MODELS = re.compile(r"/(?:v1|v1beta)/models(?:/(?P<model>[A-Za-z0-9._@/-]+))?\Z")
_POST: dict[str, tuple[str, Kind]] = {
    "/v1/chat/completions": (CHAT, "generate"),
    "/v1/responses": (RESPONSES, "generate"),
    "/v1/messages": (ANTHROPIC, "generate"),
    "/v1/messages/count_tokens": (ANTHROPIC, "count"),
}
_QUERY = {"beta": re.compile(r"true\Z"), "alt": re.compile(r"(?:sse|json)\Z")}
"""Allowed query fields and their values. `key` is also allowed; it is the client's token and is not forwarded."""


@dataclass(frozen=True)
class ApiRoute:
    """An allowed request. `path`, with its query but without the token, is appended to the driver's address; only Gemini's paths show
    model and stream."""

    dialect: str
    kind: Kind
    path: str
    model: str | None = None
    stream: bool | None = None


def dialect_of(path: str) -> str:
    """Return the dialect of a path's errors, also for paths that are refused."""
    if path.startswith("/v1beta"):
        return GEMINI
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else CHAT


def keys_in(target: str) -> list[str]:
    return [value for name, value in _pairs(target.partition("?")[2]) if name == "key"]


def route(method: str, target: str) -> ApiRoute:
    """Return the route of a request to `target`, a path with a query, undecoded. Raises Refusal if the request is not allowed."""
    path, _, query = target.partition("?")
    plain = len(path) <= 400 and _PLAIN.match(path) is not None
    models, gemini = _MODELS.match(path), _GEMINI.match(path)
    wanted = "POST"
    if plain and path in _POST:
        found = ApiRoute(*_POST[path], path.removeprefix("/v1"))
    elif plain and models:
        found, wanted = ApiRoute(dialect_of(path), "models", path, models["model"]), "GET"
    elif plain and gemini and gemini["verb"] in _VERBS:
        stream = gemini["verb"] == "streamGenerateContent"
        found = ApiRoute(GEMINI, _VERBS[gemini["verb"]], gemini["path"], gemini["model"], stream)
    else:
        known = ", ".join([*_POST, "/v1/models", "/v1beta/models/MODEL:generateContent", ":streamGenerateContent"])
        raise Refusal(404, "unknown_path", f"the driver's gateway doesn't pass {path[:200]!r}; it passes {known}")
    if method != wanted:
        raise Refusal(405, "method", f"{path} takes {wanted}, not {method[:20]}")
    kept: dict[str, str] = {}
    for name, value in _pairs(query):
        if name == "key":
            continue
        if name not in _QUERY or not _QUERY[name].match(value) or name in kept:
            raise Refusal(400, "query", f"the driver's gateway doesn't pass the query {name[:40]!r} with this value")
        kept[name] = value
    return replace(found, path=found.path + (f"?{urlencode(kept)}" if kept else ""))


def _pairs(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20, errors="strict")
    except ValueError:
        raise Refusal(400, "query", "the query of this request can't be read") from None


# --- what an experiment's `drivers.NAME.tools` allows beyond plain generation, and the refusal of the rest.
# An entry is the name of a hosted tool (`web_search` also covers `web_search_20250305` and `web_search_preview`), a field of
# the request (`plugins`), a kind of content, or `remote_urls`.

REMOTE_URLS = "remote_urls"

_VERSION = re.compile(r"(?:_preview|_tool_result|_call|_options|_mode|_toolset|_?\d[\d_]*)+\Z")
"""Suffixes that providers append to a tool's name."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Allowed:
    """The allowed names."""

    def __init__(self, tools: Iterable[str]) -> None:
        self._names = {_plain(name) for name in tools}

    def __contains__(self, name: str) -> bool:
        plain = _plain(name)
        return plain in self._names or _VERSION.sub("", plain) in self._names

    def need(self, name: str, what: str) -> None:
        """Check a name. Raises Refusal if `name` is not allowed. It comes from the client, so it is shortened and quoted."""
        if name not in self:
            message = f"{what} {name[:80]!r} is not allowed in this run: the driver may generate text and call the agent's own tools, and reaches nothing else. Send the request without it"
            raise Refusal(403, "hosted_tool", message)

    def need_all(self, found: Iterable[str], harmless: frozenset[str], what: str) -> None:
        """Check the names in `found` that are not in `harmless`, see `need`."""
        for name in found:
            if name not in harmless:
                self.need(name, what)


def _plain(name: str) -> str:
    """Return one spelling for `googleSearch`, `google_search` and `Google_Search`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:200]).lower().replace("-", "_")

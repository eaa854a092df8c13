"""Hold the gateway's settings, its refusals in each provider's wording, the allowed routes, and `Allowed` (hosted tools).

Settings come as one JSON line on standard input, never in argv, because they hold a token and maybe a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

from pydantic import AliasChoices, Field, ValidationError, model_validator

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.base import Strict
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.states import Fault

DEFAULT_TIMEOUT_S = 600.0
"""Seconds of silence; drivers that reason are silent for minutes."""


class Upstream(Strict):
    """The driver's address, or a file that holds the current one."""

    url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$", description="With `/v1`, without what follows.")
    endpoint_file: Path | None = None
    key_file: Path | None = None
    key: str | None = Field(None, repr=False)
    proxy: str | None = Field(None, repr=False, description="An HTTP proxy; not used for this machine itself.")
    timeout_s: float = Field(DEFAULT_TIMEOUT_S, gt=0, description="Longest silence: before the answer and within it.")
    retries: int = Field(3, ge=0, description="How often a driver that can't be reached is tried again.")

    @model_validator(mode="after")
    def _one_address(self) -> Upstream:
        if (self.url is None) == (self.endpoint_file is None):
            raise ValueError("give one of `url` and `endpoint_file`")
        if self.key is not None and self.key_file is not None:
            raise ValueError("give one of `key` and `key_file`")
        return self


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
    """Settings of one gateway.

    Attributes:
        unix: path for its Unix socket; None for none.
        port: port on the loopback, 0 for a free one; None for none.
        listening: descriptors of sockets that already listen, the port's first. They belong to the parent and outlive this
            process.
        token: what clients send as their key.
        model: the only model that may be used; `aliases` are other names of it that the driver knows.
        used: the run's use as last reported to the supervisor. It counts if `log` has less.
        log: driver.jsonl of the run.
        bodies: folder for request and answer bodies; None if they are not stored.
        tools: hosted tools, fields and `remote_urls` that are allowed.
        attempt, elapsed_s: the run's at the start of this process, for the log.
        max_output_tokens: assumed length of an answer if the request sets no limit.
    """

    unix: Path | None = None
    port: int | None = Field(None, ge=0, le=65535)
    listening: tuple[int, ...] = ()
    token: str = Field(min_length=16, repr=False)
    upstream: Upstream
    model: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    prices: Prices | None = None
    limits: RunLimits | None = None
    used: DriverUse = DriverUse()
    log: Path
    bodies: Path | None = None
    tools: tuple[str, ...] = ()
    attempt: int = Field(1, ge=1)
    elapsed_s: float = Field(0.0, ge=0)
    max_output_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> Settings:
        if self.limits is not None and self.limits.cost_usd is not None and self.prices is None:
            raise ValueError("a limit of cost needs prices")
        return self


def told(value: Any) -> Settings:
    """Return the settings in a line.

    Raises:
        AutorlError: names the wrong field, without its value.
    """
    if isinstance(value, dict) and value.get("prices") is not None:
        prices = value["prices"]
        if isinstance(prices, dict) and not any(each is not None for each in prices.values()):
            value = {**value, "prices": None}
    try:
        return Settings.model_validate(value)
    except ValidationError as error:  # values are secrets and are not quoted
        first = error.errors(include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
        raise AutorlError(
            f"field `{field}`: {first['msg'].removeprefix('Value error, ')}",
            where="the gateway's standard input",
            fault=Fault.CLUSTER,
            next_step="this is a defect of the suite or of the experiment's `drivers`: see what the supervisor logged",
            exit_code=Exit.USAGE,
        ) from None


# --- refusals: the gateway's own answers, in the wording of the client's dialect

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
"""Statuses of ours after which the same request may be answered later."""


class Refusal(Exception):
    """An answer of the gateway in place of the driver's.

    Args:
        status: HTTP status.
        code: a stable word for programs: `budget_exhausted`, `driver_closed`, `hosted_tool`, ...
        message: for the client, usually an LLM.
        retry_after_s: seconds after which the client should retry.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s

    @property
    def passing(self) -> bool:
        """Return whether the same request may be answered later."""
        return self.status in PASSING

    def body(self, dialect: str) -> bytes:
        """Return JSON in the wording of the dialect's provider."""
        return json.dumps(_error(dialect, self.status, self.code, self.message)).encode()

    def headers(self) -> dict[str, str]:
        """Return the headers; the providers' client libraries obey `x-should-retry`."""
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


# --- routes: only listed paths pass, compared undecoded: no dots, encoded characters, double slashes, absolute addresses

Kind = Literal["generate", "count", "models"]

_PLAIN = re.compile(r"/[A-Za-z0-9._:@/-]{1,400}\Z")
_GEMINI = re.compile(
    r"/v1beta/models/(?P<model>[A-Za-z0-9._@/-]+):(?P<verb>generateContent|streamGenerateContent|countTokens)\Z"
)
_MODELS = re.compile(r"/(?:v1|v1beta)/models(?:/(?P<model>[A-Za-z0-9._@/:-]+))?\Z")

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
    """An allowed request.

    Attributes:
        path: from the second slash on, appended to the driver's address.
        model: if the path names it.
        stream: if the path shows it (Gemini); None if the body does.
        sse: a stream comes as server-sent events.
        query: with its question mark, without the token.
    """

    dialect: str
    kind: Kind
    path: str
    model: str | None
    stream: bool | None
    sse: bool
    query: str


class Target(NamedTuple):
    """A request's target in two parts."""

    path: str
    query: str


def split(target: str) -> Target:
    """Split a target into path and query, undecoded."""
    path, _, query = target.partition("?")
    return Target(path, query)


def dialect_of(path: str) -> str:
    """Return the dialect of a path's errors, also for paths that are refused."""
    if path.startswith("/v1beta"):
        return GEMINI
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else CHAT


def keys_in(query: str) -> list[str]:
    """Return the values of `key`."""
    return [value for name, value in _pairs(query) if name == "key"]


def route(method: str, target: Target) -> ApiRoute:
    """Return the route of a request.

    Raises:
        Refusal: the request is not allowed.
    """
    path = target.path
    plain = _PLAIN.match(path) and "//" not in path and not any(set(part) <= {"."} for part in path[1:].split("/"))
    if not plain:
        raise _unknown(path)
    query = _passed(target.query)
    if _MODELS.match(path) and ":" not in path.rpartition("/")[2]:
        _method(method, "GET", path)
        return ApiRoute(dialect_of(path), "models", path, _MODELS.match(path)["model"], False, False, query)  # type: ignore[index]
    gemini = _GEMINI.match(path)
    if gemini:
        _method(method, "POST", path)
        kind: Kind = "count" if gemini["verb"] == "countTokens" else "generate"
        stream = gemini["verb"] == "streamGenerateContent"
        sse = stream and "alt=sse" in query
        return ApiRoute(GEMINI, kind, path.removeprefix("/v1beta"), gemini["model"], stream, sse, query)
    if path in _POST:
        _method(method, "POST", path)
        dialect, kind = _POST[path]
        return ApiRoute(dialect, kind, path.removeprefix("/v1"), None, None, True, query)
    raise _unknown(path)


def _unknown(path: str) -> Refusal:
    known = ", ".join([*_POST, "/v1/models", "/v1beta/models/MODEL:generateContent", ":streamGenerateContent"])
    return Refusal(404, "unknown_path", f"the driver's gateway doesn't pass {path[:200]!r}; it passes {known}")


def _method(method: str, wanted: str, path: str) -> None:
    if method != wanted:
        raise Refusal(405, "method", f"{path} takes {wanted}, not {method[:20]}")


def _pairs(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20, errors="strict")
    except ValueError:
        raise Refusal(400, "query", "the query of this request can't be read") from None


def _passed(query: str) -> str:
    kept: dict[str, str] = {}
    for name, value in _pairs(query):
        if name == "key":
            continue
        if name not in _QUERY or not _QUERY[name].match(value) or name in kept:
            raise Refusal(400, "query", f"the driver's gateway doesn't pass the query {name[:40]!r} with this value")
        kept[name] = value
    return f"?{urlencode(kept)}" if kept else ""


# --- what an experiment's `drivers.NAME.tools` allows beyond plain generation, and the refusal of the rest.
# An entry is the name of a hosted tool (`web_search` also covers `web_search_20250305` and `web_search_preview`), a field of
# the request (`plugins`), a kind of content, or `remote_urls`.

REMOTE_URLS = "remote_urls"

_VERSION = re.compile(r"(?:_preview|_tool_result|_call|_options|_mode|_toolset|_?\d[\d_]*)+\Z")
"""Suffixes that providers append to a tool's name."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


class Allowed:
    """The allowed names."""

    def __init__(self, tools: Iterable[str]) -> None:
        self._names = {_plain(name) for name in tools}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        plain = _plain(name)
        return plain in self._names or _VERSION.sub("", plain) in self._names

    def need(self, name: str, what: str) -> None:
        """Check a name.

        Raises:
            Refusal: `name` is not allowed.
        """
        if name not in self:
            raise refused(name, what)


def refused(name: str, what: str) -> Refusal:
    """Return the refusal of a name. `name` comes from the client, so it is shortened and quoted."""
    return Refusal(
        403,
        "hosted_tool",
        f"{what} {name[:80]!r} is not allowed in this run: the driver may generate text and call the agent's own tools, and reaches nothing "
        "else. Send the request without it",
    )


def _plain(name: str) -> str:
    """Return one spelling for `googleSearch`, `google_search` and `Google_Search`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:200]).lower().replace("-", "_")

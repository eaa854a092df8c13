"""What the supervisor tells a gateway, as one JSON line on its standard input: never in argv, for it holds a token and may hold a key."""

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
"""Of silence. Drivers that think say nothing for minutes."""


class Upstream(Strict):
    """Where the driver is: an address, or a file that names the one of now."""

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
    """Dollars for a million tokens. Without a price of cached input it costs what other input does."""

    price_in: float = Field(ge=0, validation_alias=AliasChoices("price_in", "in"))
    price_out: float = Field(ge=0, validation_alias=AliasChoices("price_out", "out"))
    price_cached: float | None = Field(None, ge=0, validation_alias=AliasChoices("price_cached", "cached"))


class RunLimits(Strict):
    """Of the run, all attempts together. None: none."""

    tokens: int | None = Field(None, ge=0, description="In and out, cached input among them.")
    cost_usd: float | None = Field(None, ge=0)


class Settings(Strict):
    """One gateway.

    Attributes:
        unix: where its Unix socket is made; None: none.
        port: 0 for a free port of the loopback; None: none.
        listening: descriptors of sockets that listen already, the port's first. They outlive this process with who made them.
        token: what clients show as their key.
        model: the one that may be asked; `aliases` are other names of it that the driver knows.
        used: what the supervisor last heard that the run has used. Where `log` tells less, this counts.
        log: driver.jsonl of the run.
        bodies: folder for request and answer bodies; None: they are not kept.
        tools: hosted tools, fields and `remote_urls` that are not refused.
        attempt, elapsed_s: of the run as this process begins, for the log.
        max_output_tokens: what an answer is taken for whose request sets no limit.
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
    """The settings in a line that was read.

    Raises:
        AutorlError: naming the wrong field, without its value.
    """
    if isinstance(value, dict) and value.get("prices") is not None:
        prices = value["prices"]
        if isinstance(prices, dict) and not any(each is not None for each in prices.values()):
            value = {**value, "prices": None}
    try:
        return Settings.model_validate(value)
    except ValidationError as error:  # values are not quoted: they are secrets
        first = error.errors(include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(all of it)"
        raise AutorlError(
            f"field `{field}`: {first['msg'].removeprefix('Value error, ')}",
            where="the gateway's standard input",
            fault=Fault.CLUSTER,
            next_step="this is a defect of the suite or of the experiment's `drivers`: see what the supervisor logged",
            exit_code=Exit.USAGE,
        ) from None


# What the gateway itself answers, in the words of the client's dialect.

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


# Which requests are known: an exact list of paths. What is not in it doesn't pass.
#
# Paths are compared as they came, undecoded: no dots, no encoded characters, no double slashes, no absolute addresses.

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
"""What may stand behind a question mark, and how; and `key`, which is the client's token and doesn't pass."""


@dataclass(frozen=True)
class ApiRoute:
    """One request that is known.

    Attributes:
        path: from the second slash on: what is appended to the driver's address.
        model: where the path names it.
        stream: where the path tells it (Gemini); None: the body does.
        sse: a stream that comes as events.
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
    """Path and query as they came."""
    path, _, query = target.partition("?")
    return Target(path, query)


def dialect_of(path: str) -> str:
    """In which dialect an error is told; also for paths that are refused."""
    if path.startswith("/v1beta"):
        return GEMINI
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else CHAT


def keys_in(query: str) -> list[str]:
    """Values of `key`."""
    return [value for name, value in _pairs(query) if name == "key"]


def route(method: str, target: Target) -> ApiRoute:
    """The known request.

    Raises:
        Refusal: it is none.
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


# What an experiment's `drivers.NAME.tools` allows beyond plain generation, and how a refusal of it is worded.
#
# An entry is the name of a hosted tool (`web_search` stands for `web_search_20250305` and `web_search_preview` too), of a field of the request
# (`plugins`), of a kind of content, or `remote_urls`.

REMOTE_URLS = "remote_urls"

_VERSION = re.compile(r"(?:_preview|_tool_result|_call|_options|_mode|_toolset|_?\d[\d_]*)+\Z")
"""What providers append to a tool's name."""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Allowed:
    """The names that are allowed."""

    def __init__(self, tools: Iterable[str]) -> None:
        self._names = {_plain(name) for name in tools}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        plain = _plain(name)
        return plain in self._names or _VERSION.sub("", plain) in self._names

    def need(self, name: str, what: str) -> None:
        """
        Raises:
            Refusal: `name` is not allowed.
        """
        if name not in self:
            raise refused(name, what)


def refused(name: str, what: str) -> Refusal:
    """The one wording of it. `name` is the client's: shortened, and quoted as Python does."""
    return Refusal(
        403,
        "hosted_tool",
        f"{what} {name[:80]!r} is not allowed in this run: the driver may generate text and call the agent's own tools, and reaches nothing "
        "else. Send the request without it",
    )


def _plain(name: str) -> str:
    """`googleSearch`, `google_search` and `Google_Search` are one."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:200]).lower().replace("-", "_")

"""Which requests are known: an exact list of paths. What is not in it doesn't pass.

Paths are compared as they came, undecoded: no dots, no encoded characters, no double slashes, no absolute addresses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

from autorl_hpc.gateway.refusals import ANTHROPIC, CHAT, GEMINI, RESPONSES, Refusal

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
class Route:
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


def route(method: str, target: Target) -> Route:
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
        return Route(dialect_of(path), "models", path, _MODELS.match(path)["model"], False, False, query)  # type: ignore[index]
    gemini = _GEMINI.match(path)
    if gemini:
        _method(method, "POST", path)
        kind: Kind = "count" if gemini["verb"] == "countTokens" else "generate"
        stream = gemini["verb"] == "streamGenerateContent"
        sse = stream and "alt=sse" in query
        return Route(GEMINI, kind, path.removeprefix("/v1beta"), gemini["model"], stream, sse, query)
    if path in _POST:
        _method(method, "POST", path)
        dialect, kind = _POST[path]
        return Route(dialect, kind, path.removeprefix("/v1"), None, None, True, query)
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

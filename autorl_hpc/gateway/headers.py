"""Which headers pass, and whose key stands in them. Of requests those of a list; of answers all but those of a list."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Final

from autorl_hpc.gateway.allowed import Allowed, names
from autorl_hpc.gateway.refusals import ANTHROPIC, GEMINI, Refusal

PASSED: Final = names(
    "accept accept-language user-agent openai-beta x-app x-goog-api-client idempotency-key x-request-id x-client-request-id originator "
    "session_id session-id conversation_id version http-referer x-title"
)
PASSED_PREFIXES: Final = ("anthropic-", "x-stainless-", "x-codex-", "x-claude-", "x-gemini-", "x-opencode-")

KEPT_BACK: Final = names(
    "connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length set-cookie set-cookie2 www-authenticate "
    "proxy-authenticate location alt-svc server date openai-organization openai-project anthropic-organization-id via "
    "strict-transport-security"
)
"""Of answers: what is between two machines only, and what tells whose account it is."""

AUTHORIZATION, X_API_KEY, X_GOOG = "authorization", "x-api-key", "x-goog-api-key"
MAX_VALUE_CHARS: Final = 8192
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def shown_key(headers: Mapping[str, str], in_query: Iterable[str], token: str) -> str:
    """The header in which the client showed the run's token.

    Raises:
        Refusal: it showed none, or another one.
    """
    scheme, _, bearer = headers.get(AUTHORIZATION, "").partition(" ")
    places = [(AUTHORIZATION, bearer.strip() if scheme.lower() == "bearer" else "")]
    places += [(name, headers.get(name, "")) for name in (X_API_KEY, X_GOOG)]
    places += [(X_GOOG, value) for value in in_query]
    found = [name for name, value in places if hmac.compare_digest(value.encode("utf-8", "replace"), token.encode())]
    if not found:
        raise Refusal(
            401, "token", "show the run's token as API key: it is in OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY"
        )
    return found[0]


def to_driver(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those of a request that pass; of one that stands twice, the first."""
    kept: dict[str, str] = {}
    for name, value in headers:
        lowered = name.lower()
        known = lowered in PASSED or lowered.startswith(PASSED_PREFIXES)
        if known and lowered not in kept and len(value) <= MAX_VALUE_CHARS and value.isprintable():
            kept[lowered] = value
    return kept


def check_beta(headers: Iterable[tuple[str, str]], allowed: Allowed) -> None:
    """
    Raises:
        Refusal: the client asks for Anthropic's window of a million tokens, whose input costs more than the stated prices.
    """
    for name, value in headers:
        if name.lower() == "anthropic-beta":
            for each in value.split(","):
                if each.strip().lower().startswith("context-1m"):
                    allowed.need(each.strip().lower(), "in anthropic-beta the word")


def with_key(dialect: str, shown_in: str, key: str | None, *, bearer: bool) -> dict[str, str]:
    """The real key, where the client showed its token; `bearer`: there too, for servers of open weights look nowhere else."""
    if key is None:
        return {}
    place = {X_GOOG: X_GOOG if dialect == GEMINI else AUTHORIZATION, X_API_KEY: X_API_KEY}.get(shown_in, AUTHORIZATION)
    if place == X_API_KEY and dialect != ANTHROPIC:
        place = AUTHORIZATION
    made = {place: f"Bearer {key}" if place == AUTHORIZATION else key}
    if bearer:
        made[AUTHORIZATION] = f"Bearer {key}"
    return made


def to_client(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of an answer that pass; none with a control character, which no HTTP server sends on."""
    return [
        (name, value) for name, value in headers if name.lower() not in KEPT_BACK and not _CONTROL.search(name + value)
    ]

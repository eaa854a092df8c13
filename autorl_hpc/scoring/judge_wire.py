"""One request to an OpenAI-compatible endpoint (`/chat/completions`), on the standard library, and the reading of its answer.

The environment's proxies are used (`https_proxy`, `no_proxy`, ...), but not for this machine itself: no proxy leads there.
Redirects are not followed: they would carry the key to another address.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from autorl_hpc import __version__
from autorl_hpc.records.names import printable
from autorl_hpc.scoring.judge_cache import Answer
from autorl_hpc.scoring.outcome import JudgeFailed

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Of one response; an answer of a few tokens has some hundred bytes."""

MAX_QUOTE_CHARS: Final = 200
"""Of what an endpoint says in an error."""

PASSING: Final = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529))
"""Statuses after which the same request may succeed."""

REFUSALS: Final = frozenset((400, 413, 422))
"""Statuses that may be about this one conversation: too long, or caught by a filter."""

LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))


class TryAgain(Exception):
    """The same request may succeed later.

    Args:
        after_s: how long the endpoint asks to wait, if it does.
    """

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


class RequestRefused(Exception):
    """The endpoint won't answer this conversation; it may answer others."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where a judge is asked.

    Attributes:
        url: without `/chat/completions`; it may have a query.
        key: sent as a bearer token and named nowhere; None: none.
        timeout_s: of one exchange, from the connection to the last byte.
        answers_as: names by which answers may call the model: one of them, or one with more behind it (a dated snapshot).
    """

    url: str
    key: str | None
    timeout_s: float
    answers_as: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The address without its query, for messages."""
        return self.url.partition("?")[0]

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """The answer to one request.

        Raises:
            TryAgain: a passing trouble: busy, broken, late, or no answer of the form that is agreed.
            RequestRefused: the endpoint refuses this conversation.
            JudgeFailed: no request like this one will be answered: address, key, model or a parameter is wrong.
        """
        try:
            answer = self._read(
                self._exchange(json.dumps(dict(body), ensure_ascii=False).encode("utf-8", "replace")), body
            )
        except (TryAgain, RequestRefused, JudgeFailed) as error:
            # A server may quote what it was sent; a new exception, as the old one's words can't be changed.
            words = self._without_key(str(error))
            if isinstance(error, TryAgain):
                raise TryAgain(words, error.after_s) from None
            raise type(error)(words) from None
        return answer

    def _without_key(self, words: str) -> str:
        return words.replace(self.key, "***") if self.key else words

    def _exchange(self, data: bytes) -> bytes:
        address, question, query = self.url.partition("?")
        request = urllib.request.Request(f"{address}/chat/completions{question}{query}", data=data, method="POST")
        request.add_header("Content-Type", "application/json")
        request.add_header("User-Agent", f"autorl-hpc/{__version__}")
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._opener().open(request, timeout=self.timeout_s) as response:
                return _body(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._by_status(error, deadline) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise JudgeFailed(
                    f"{self.shown} shows a certificate that is not trusted: {reason.verify_message}"
                ) from None
            what = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
            raise TryAgain(f"{self.shown} can't be reached or broke off ({_quoted(what)})") from None

    def _opener(self) -> urllib.request.OpenerDirector:
        here = urlsplit(self.url).hostname in LOOPBACK
        proxies = urllib.request.ProxyHandler({}) if here else urllib.request.ProxyHandler()
        return urllib.request.build_opener(proxies, _NoRedirect())

    def _by_status(self, error: urllib.error.HTTPError, deadline: float) -> Exception:
        try:
            said = _message(_body(error, deadline))
        except (OSError, http.client.HTTPException, TryAgain):
            said = ""
        what = f"{self.shown} answered {error.code}" + (f": {said}" if said else "")
        if error.code in PASSING:
            return TryAgain(what, _retry_after_s(error.headers.get("Retry-After")))
        if error.code in REFUSALS:
            return RequestRefused(what)
        return JudgeFailed(what)

    def _read(self, data: bytes, body: Mapping[str, Any]) -> Answer:
        try:
            value = json.loads(data)
            choice = value["choices"][0]
            text = choice["message"]["content"]
            finish = choice.get("finish_reason")
            named = value.get("model")
            usage = value.get("usage") or {}
            prompt, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
            raise TryAgain(f"{self.shown} gave no chat completion: {_message(data) or 'an empty body'}") from None
        if not isinstance(text, str | None):
            raise TryAgain(f"{self.shown} gave a message whose content is no text")
        if isinstance(named, str) and not any(named.startswith(name) for name in self.answers_as):
            raise JudgeFailed(
                f"{self.shown} answered as model `{_quoted(named)}`, asked was `{body['model']}`; if that is the same one, "
                "name it in `judge.answers_as`"
            )
        logprobs = _first_token(choice) if body.get("logprobs") else {}
        if body.get("logprobs") and not logprobs:
            raise JudgeFailed(
                f"{self.shown} gives no log probabilities, which this recipe needs; use one whose judge is discrete"
            )
        return Answer(text or "", logprobs, prompt, written, finish if isinstance(finish, str) else "")


def _body(response: Any, deadline: float) -> bytes:
    """All of a response, piece by piece: each piece may come in time and the whole take for ever."""
    parts, size = [], 0
    while part := response.read1(65536):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise TryAgain(f"a response of more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the response took too long")
    return b"".join(parts)


def _first_token(choice: Mapping[str, Any]) -> dict[str, float]:
    """Log probabilities of the first token's likeliest candidates; empty where they are missing or no numbers."""
    try:
        candidates = choice["logprobs"]["content"][0]["top_logprobs"]
        found = [(str(each["token"]), float(each["logprob"])) for each in candidates]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return {}
    return {token: value for token, value in reversed(found) if math.isfinite(value)}


def _message(data: bytes) -> str:
    """What a body says, in a few plain characters: its error's message, or its beginning."""
    try:
        value = json.loads(data)
        error = value.get("error", value) if isinstance(value, dict) else value
        said = error.get("message", error) if isinstance(error, dict) else error
        return _quoted(said if isinstance(said, str) else json.dumps(said))
    except (ValueError, RecursionError):
        return _quoted(data[: 4 * MAX_QUOTE_CHARS].decode("utf-8", "replace"))


def _quoted(text: str) -> str:
    return printable(" ".join(text.split()))[:MAX_QUOTE_CHARS]


def _retry_after_s(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which gives seconds or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None

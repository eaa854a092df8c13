"""Asks the driver: one chat completion over plain HTTP, streamed, with patience. Standard library only."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

IDLE_S = 600.0
"""So long nothing may come. A local driver that is busy with others thinks for minutes before its first word."""
REQUEST_S = 3600.0
"""So long one answer may take in all: a driver that repeats itself without an end is cut."""
PATIENCE_S = 1200.0
"""So long a driver may be away. One whose job died must be queued again and load its weights."""
LONGEST_PAUSE_S = 60.0
LONGEST_ASKED_PAUSE_S = 300.0
"""Of a `Retry-After`: above it the driver is asked again all the same."""
ERROR_BYTES = 64 * 1024

_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|maximum context|too many (input )?tokens|prompt is too long|input is too long"
    r"|reduce the length|request[^.]{0,20}too large|exceeds? the (maximum|available|model)[^.]{0,60}tokens|longer than the model",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"(?:maximum|max)[^.\d]{0,40}(?:is|of|:)\s*(\d{3,9})", re.IGNORECASE)
CLOSED = frozenset({"budget_exhausted", "driver_closed"})
"""By these words the gateway says that the run may not ask any more."""

_OF_BUDGET = "The run's budget of"
"""So the gateway begins to say what is left, where a request's input alone takes more."""

_ROLES = re.compile(r"system role|roles must alternate|system message", re.IGNORECASE)


class DriverError(Exception):
    """The driver did not answer, and asking again will not help."""


class BudgetOver(DriverError):
    """The gateway refuses: a budget of the run is used up."""


class Rejected(DriverError):
    """Wrong key, no such model, a request that it does not understand."""


class Unreachable(DriverError):
    """It stayed away for longer than anyone waits."""


class TooLong(DriverError):
    """The conversation does not fit.

    Attributes:
        limit_tokens: the window, if the driver told it.
        of_budget: it is not the window: so much is left of the run's budget.
    """

    def __init__(self, message: str, limit_tokens: int | None, *, of_budget: bool = False) -> None:
        super().__init__(message)
        self.limit_tokens, self.of_budget = limit_tokens, of_budget


class Passing(Exception):
    """Something that passes: ask again, after `pause_s` if the driver said so."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


@dataclass
class Reply:
    """What the driver said. Token counts are None where it told none."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    model: str = ""
    usage: dict[str, Any] | None = None

    @property
    def tokens_in(self) -> int | None:
        """Tokens of the prompt."""
        told = (self.usage or {}).get("prompt_tokens")
        return told if isinstance(told, int) and told > 0 else None


@dataclass
class Quirks:
    """What a driver turned out not to take. Learned from its refusals, once."""

    usage_in_stream: bool = True
    limit_field: str = "max_tokens"
    system_role: bool = True


class Driver:
    """An OpenAI-compatible endpoint.

    Args:
        url: up to and with /v1.
        parameters: further fields of each request.
        over: whether the run's budget is used up, in words; looked at while waiting.
        tell: gets a line about each failure that is waited out.
    """

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        parameters: dict[str, Any],
        *,
        over: Callable[[], str | None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None,
        patience_s: float = PATIENCE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self.url, self.model, self.parameters = url.rstrip("/"), model, parameters
        self.over, self.tell, self.patience_s, self.idle_s = over, tell, patience_s, idle_s
        self.quirks = Quirks()
        self._key = key
        # No proxy: the address is the gateway's on the loopback, and the gateway knows the proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]], max_tokens: int | None) -> Reply:
        """One answer.

        Raises:
            DriverError: one of its kinds.
        """
        failed_at, failures = 0.0, 0
        while True:
            try:
                return self._once(self._body(messages, tools, max_tokens))
            except Passing as error:
                pause_s = error.pause_s
                if pause_s is None:
                    pause_s = min(LONGEST_PAUSE_S, 2.0**failures) * random.uniform(0.5, 1.0)
                failed_at = failed_at if failures else time.monotonic()  # a long answer that breaks off is no waiting
                failures += 1
                waited_s = time.monotonic() - failed_at
                if waited_s + pause_s > self.patience_s:
                    raise Unreachable(f"the driver did not answer for {waited_s:.0f} s: {error}") from None
                self.tell(f"the driver failed ({error}); asked again in {pause_s:.1f} s")
                self._wait(pause_s)
            except Rejected as error:
                if not self._adapt(str(error), max_tokens):
                    raise
                self.tell(f"the driver refused ({error}); asked again in another way")

    def _wait(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            reason = self.over()
            if reason is not None:
                raise BudgetOver(reason)
            time.sleep(min(1.0, left_s))

    def _body(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        if not self.quirks.system_role and messages and messages[0]["role"] == "system":
            first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            body["messages"] = [first, *messages[2:]]
        if self.quirks.usage_in_stream:
            body["stream_options"] = {"include_usage": True}
        if tools:
            body["tools"] = tools
        if max_tokens is not None and not {"max_tokens", "max_completion_tokens"} & set(self.parameters):
            body[self.quirks.limit_field] = max_tokens
        return {**body, **self.parameters}

    def _adapt(self, refusal: str, max_tokens: int | None) -> bool:
        """Whether the request can be put in another way that has not been tried."""
        quirks, said = self.quirks, refusal.lower()
        if quirks.usage_in_stream and ("stream_options" in said or "include_usage" in said):
            quirks.usage_in_stream = False
        elif quirks.limit_field == "max_tokens" and "max_completion_tokens" in said and max_tokens is not None:
            quirks.limit_field = "max_completion_tokens"
        elif quirks.system_role and _ROLES.search(refusal):
            quirks.system_role = False
        else:
            return False
        return True

    def _once(self, body: dict[str, Any]) -> Reply:
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        try:
            with self._opener.open(request, timeout=self.idle_s) as response:
                if "event-stream" in (response.headers.get("Content-Type") or ""):
                    return _read_stream(response)
                return _read_whole(json.loads(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                raise _failure(error.code, _body_of(error), error.headers.get("Retry-After")) from None
        except urllib.error.URLError as error:
            raise Passing(f"no connection: {error.reason}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise Passing(f"{type(error).__name__}: {error}") from None


def _body_of(error: urllib.error.HTTPError) -> bytes:
    try:
        return bytes(error.read(ERROR_BYTES))
    except (OSError, HTTPException):
        return b""


def _failure(status: int, body: bytes, retry_after: str | None = None) -> Exception:
    """What an error answer means."""
    text, kinds = body.decode("utf-8", "replace").strip()[:2000], set()
    try:
        value = json.loads(body)
        error = value.get("error", value) if isinstance(value, dict) else value
        if isinstance(error, dict):
            kinds = {str(error.get(key)) for key in ("type", "code")}
            text = str(error.get("message") or text)
    except ValueError:
        pass
    told = f"{status}: {text[:500]}"
    if kinds & CLOSED:
        return BudgetOver(text[:500])
    if status == 413 or (status in (400, 422) and (_TOO_LONG.search(text) or "context_length_exceeded" in kinds)):
        limit = _LIMIT.search(text)
        return TooLong(told, int(limit[1]) if limit else None, of_budget=_OF_BUDGET in text)
    if "insufficient_quota" in kinds:
        return Rejected(told)
    if status in (408, 409, 425, 429) or status >= 500:
        return Passing(told, _pause_of(retry_after))
    return Rejected(told)


def _pause_of(retry_after: str | None) -> float | None:
    """Seconds, or a date."""
    if not retry_after:
        return None
    try:
        pause_s = float(retry_after)
    except ValueError:
        try:
            pause_s = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(pause_s, 0.1), LONGEST_ASKED_PAUSE_S)


def _read_whole(value: Any) -> Reply:
    try:
        choice = value["choices"][0]
        message = choice["message"]
        return Reply(
            text=message.get("content") or "",
            calls=[call for call in message.get("tool_calls") or [] if isinstance(call, dict)],
            finish=choice.get("finish_reason"),
            model=str(value.get("model") or ""),
            usage=value.get("usage"),
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Passing(f"an answer that is none: {str(value)[:200]}") from None


def _read_stream(lines: Iterable[bytes]) -> Reply:
    """Server-sent events put together. A stream without its end is no answer: half a command must not run."""
    deadline = time.monotonic() + REQUEST_S
    reply, words = Reply(), list[str]()
    calls: dict[int, dict[str, Any]] = {}
    for line in lines:
        if time.monotonic() > deadline:
            raise Passing(f"the answer did not end within {REQUEST_S:.0f} s")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if event.get("error"):
            error = event["error"] if isinstance(event["error"], dict) else {}
            code = error.get("code")
            raise _failure(code if isinstance(code, int) else 500, data)
        reply.model = reply.model or str(event.get("model") or "")
        reply.usage = event.get("usage") or reply.usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            words.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or []:
                _add_call(calls, part)
            reply.finish = choice.get("finish_reason") or reply.finish
    if reply.finish is None:
        raise Passing("the stream was cut")
    reply.text, reply.calls = "".join(words), [calls[index] for index in sorted(calls)]
    return reply


def _add_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Name and arguments of a tool call come in pieces."""
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(int(part.get("index") or 0), empty)
    call["id"] = part.get("id") or call["id"]
    for key, value in (part.get("function") or {}).items():
        if key in ("name", "arguments") and isinstance(value, str):
            call["function"][key] += value

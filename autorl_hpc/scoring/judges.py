"""Judge models: requests to an OpenAI-compatible endpoint with retries and a cache, the built-in judge, and `make_judge`. If
the endpoint fails, `JudgeFailed` says why; this is never a loss or a win."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import store
from autorl_hpc.files.processes import GivenUp, ended_by
from autorl_hpc.records.base import printable
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.scoring.judge_cache import JudgeCache, JudgeReply, request_key
from autorl_hpc.scoring.outcome import Judge, JudgeFailed, Verdict
from autorl_hpc.states import Fault

if TYPE_CHECKING:
    from aiohttp import ClientSession

JUDGE_MODEL: Final = "judge_model"
"""Recipe option with the judge's name; filled in at launch, or set by a task that has its own judge."""
JUDGE_REVISION: Final = "judge_revision"  # Recipe option with the experiment's `judge.revision`; filled in at launch
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024  # Limit of one response; an answer of a few tokens has some hundred bytes
MAX_QUOTE_CHARS: Final = 200  # Limit of an endpoint's text quoted in an error
PASSING: Final = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529))
"""Status codes after which the same request may succeed."""
REFUSALS: Final = frozenset((400, 403, 413, 422, 451))
"""Status codes that may concern only this conversation, which holds an answer of the model: too long, or filtered."""
LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
FIRST_PAUSE_S: Final = 1.0  # Pause after the first failure; it doubles with each further one
MAX_PAUSE_S: Final = 120.0  # Longest pause before a retry, even if the endpoint asks for a longer one
MAX_REFUSALS: Final = 10  # If this many conversations were refused and none answered, the request itself is wrong


class RetryRequest(Exception):
    """The same request may succeed later; `after_s` is the wait that the endpoint asks for, if any."""

    def __init__(self, what: str, after_s: float | None = None) -> None:
        super().__init__(what)
        self.after_s = after_s


class RequestRefused(Exception):
    """The endpoint refuses this conversation, but may answer others."""


@dataclass(frozen=True)
class JudgeUsage:
    """A judge's usage so far: requests sent (failed ones too), replies from the cache, tokens, and the cost if prices are set."""

    requests: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    def since(self, before: JudgeUsage) -> dict[str, float]:
        """Return the difference as metrics of an evaluation."""
        then = vars(before)
        return {
            f"judge_{name}": float(value - (then[name] or 0)) for name, value in vars(self).items() if value is not None
        }


class MeteredJudge(Judge, Protocol):
    """A judge that counts its usage."""

    @property
    def usage(self) -> JudgeUsage: ...


def make_judge(spec: JudgeSpec | None, name: str, cache: Path, revision: str | None = None) -> MeteredJudge:
    """Create the judge that a run's recipe names, with its revision. `spec` is the experiment's judge, not needed for the built-in
    one, and `cache` the folder of stored replies. AutorlError if the experiment's judge has changed, or its key can't be read."""
    if name == JudgeSpec.BUILTIN:
        return LengthAndWords()
    if spec is None or spec.name != name:
        what = f"field `judge`: this run's recipe asks the judge {name}, the experiment's is {spec.name if spec else 'none'}"
        advice = f"launch again with `judge.model: {name}`"
        raise AutorlError(what, fault=Fault.CLUSTER, next_step=advice)
    if spec.revision != revision:
        raise AutorlError(
            f"field `judge.revision`: this run's recipe asks the judge {name} at revision {revision or 'unsaid'}, the "
            f"experiment's is {spec.revision or 'unsaid'}",
            fault=Fault.CLUSTER,
            next_step="launch again with the run's `judge.revision`, or this judge under another name of the experiment",
        )
    return HttpJudge(spec, JudgeCache(cache))


def read_key(spec: JudgeSpec) -> str | None:
    """Read the judge's key; None if none is needed. Errors as for `store.read_key`."""
    if spec.key_file is None:
        return None
    return store.read_key(Path(spec.key_file).expanduser(), "field `judge.key_file`: the judge's")


class HttpJudge:
    """A judge behind an OpenAI-compatible endpoint. The environment's proxies are used, but not for localhost. Redirects are
    not followed, because they would carry the key to another address. `cache`: None to store nothing."""

    def __init__(self, spec: JudgeSpec, cache: JudgeCache | None, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.spec = spec
        self.cache = cache
        self.first_pause_s = first_pause_s
        self._key = read_key(spec)
        self._shown = spec.url.partition("?")[0]  # for messages, without a query
        address = urlsplit(spec.url)
        direct = address.hostname in LOOPBACK or urllib.request.proxy_bypass(address.hostname or "")
        self._proxy = None if direct else urllib.request.getproxies().get(address.scheme)
        self._not_before = 0.0  # the endpoint asked for a pause, which holds for all requests
        self._counts: Counter[str] = Counter()

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def usage(self) -> JudgeUsage:
        """Usage so far."""
        counts, prices = dict(self._counts), (self.spec.price_in, self.spec.price_out)
        tokens = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
        cost = sum(count * (price or 0.0) for count, price in zip(tokens, prices, strict=True)) / 1e6
        return JudgeUsage(**counts, cost=None if prices == (None, None) else cost)

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]:
        """Return the verdicts on all conversations, in order. Raises JudgeFailed: retries failed, or can't help."""
        bodies = [self._body(conversation, max_tokens, logprobs) for conversation in conversations]
        keys = [request_key(body, self.spec.url, self.spec.revision) for body in bodies]
        wanted = dict(zip(keys, bodies, strict=True))  # the same request is sent once
        found: dict[str, JudgeReply] = {}
        refused: dict[str, str] = {}
        for key in wanted:
            known = self.cache.get(key) if self.cache else None
            if known is not None and (known.logprobs or not logprobs):
                found[key] = known
        self._counts["cached"] += len(found)
        if missing := {key: body for key, body in wanted.items() if key not in found}:
            try:
                asyncio.run(self._ask_all(missing, found, refused))
            except asyncio.CancelledError:
                raise GivenUp("the judge's answers are no longer waited for") from None
        return [
            Verdict("", refused=refused[key])
            if key in refused
            else Verdict(found[key].text, found[key].logprobs, cut_off=found[key].cut_off, key=key)
            for key in keys
        ]

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if self.cache and verdict.key:
                self.cache.forget(verdict.key)

    def _body(self, conversation: Sequence[Mapping[str, str]], max_tokens: int, logprobs: int) -> dict[str, Any]:
        body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, **self.spec.parameters}
        body = {name: value for name, value in body.items() if value is not None}
        # A tokenizer can decode to a lone surrogate, which can't be sent or hashed.
        messages = [
            {name: text.encode("utf-8", "replace").decode() for name, text in turn.items()} for turn in conversation
        ]
        body |= {"model": self.spec.name, "messages": messages}
        return {**body, "logprobs": True, "top_logprobs": logprobs} if logprobs else body

    async def _ask_all(
        self, missing: Mapping[str, Mapping[str, Any]], found: dict[str, JudgeReply], refused: dict[str, str]
    ) -> None:
        """Send all requests, `concurrency` at a time, until all are answered or one fails for good."""
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        loop, free = asyncio.get_running_loop(), asyncio.Semaphore(self.spec.concurrency)
        headers = {"User-Agent": f"autorl-hpc/{__version__}"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"

        async def work(key: str) -> None:
            async with free:
                try:
                    found[key] = await self._patiently(session, missing[key])
                except RequestRefused as error:
                    refused[key] = str(error)
                    if len(refused) >= MAX_REFUSALS and not found:
                        raise JudgeFailed(str(error)) from None
                    return
            if self.cache and found[key].lasting:
                await asyncio.to_thread(self.cache.put, key, found[key])

        async with ClientSession(
            headers=headers,
            timeout=ClientTimeout(total=self.spec.timeout_s),
            connector=TCPConnector(limit=0, force_close=True),
        ) as session:
            tasks = [loop.create_task(work(key)) for key in missing]
            everything = asyncio.gather(*tasks)

            def stop() -> None:
                loop.call_soon_threadsafe(everything.cancel)

            try:
                with ended_by(stop):
                    await everything
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _patiently(self, session: ClientSession, body: Mapping[str, Any]) -> JudgeReply:
        """Return the reply to one request, with the experiment's retries. Raises RequestRefused, JudgeFailed."""
        for attempt in range(self.spec.retries + 1):
            await asyncio.sleep(self._not_before - time.monotonic())
            limit = self.spec.max_requests
            if limit is not None and self._counts["requests"] >= limit:
                raise JudgeFailed(
                    f"this grader has sent the judge {limit} requests, all that `judge.max_requests` allows"
                )
            self._counts["requests"] += 1
            try:
                answer = self._read(await self._exchange(session, body), body)
            except RetryRequest as error:
                if attempt == self.spec.retries:
                    raise JudgeFailed(f"{error}, tried {attempt + 1} times") from None
                pause_s = min(MAX_PAUSE_S, self.first_pause_s * 2**attempt) * random.uniform(0.5, 1.0)
                if error.after_s is not None:
                    pause_s = min(MAX_PAUSE_S, max(error.after_s, pause_s))
                    self._not_before = max(self._not_before, time.monotonic() + pause_s)
                await asyncio.sleep(pause_s)
                continue
            self._counts.update(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
            return answer
        raise AssertionError("the last try answers or raises")

    async def _exchange(self, session: ClientSession, body: Mapping[str, Any]) -> bytes:
        """Return a successful response's body. Raises RetryRequest, RequestRefused, or JudgeFailed where no retry can help."""
        from aiohttp import ClientConnectorCertificateError, ClientError

        address, question, query = self.spec.url.partition("?")
        url = f"{address}/chat/completions{question}{query}"
        try:
            async with session.post(url, json=body, proxy=self._proxy, allow_redirects=False) as response:
                data = b""
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > MAX_ANSWER_BYTES:
                        raise RetryRequest(f"a response of more than {MAX_ANSWER_BYTES} bytes")
        except ClientConnectorCertificateError as error:
            why = self._quoted(str(error.certificate_error))
            raise JudgeFailed(f"{self._shown} shows a certificate that is not trusted: {why}") from None
        except (OSError, ClientError, asyncio.TimeoutError) as error:
            what = str(getattr(error, "os_error", error)) or "timed out"
            raise RetryRequest(
                f"{self._shown} can't be reached or broke off ({self._quoted(f'{type(error).__name__}: {what}')})"
            ) from None
        if response.status == 200:
            return data
        said = self._message(data) if data else ""
        what = f"{self._shown} answered {response.status}{': ' if said else ''}{said}"
        if response.status in PASSING:
            raise RetryRequest(what, _retry_after_s(response.headers.get("Retry-After")))
        raise RequestRefused(what) if response.status in REFUSALS else JudgeFailed(what)

    def _read(self, data: bytes, body: Mapping[str, Any]) -> JudgeReply:
        try:
            value = json.loads(data)
            choice = value["choices"][0]
            text, finish, named = choice["message"]["content"], choice.get("finish_reason"), value.get("model")
            usage = value.get("usage") or {}
            prompt, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
            raise RetryRequest(
                f"{self._shown} gave no chat completion: {self._message(data) or 'an empty body'}"
            ) from None
        if not isinstance(text, str | None):
            raise RetryRequest(f"{self._shown} gave a message whose content is not a text")
        names = (self.spec.name, *((self.spec.answers_as,) if self.spec.answers_as else ()))
        if isinstance(named, str) and not named.startswith(names):  # a prefix: a dated snapshot is the same model
            raise JudgeFailed(
                f"{self._shown} answered as model `{self._quoted(named)}`, asked was `{body['model']}`; if that is the same one, "
                "name it in `judge.answers_as`"
            )
        logprobs = _first_token(choice) if body.get("logprobs") else {}
        if body.get("logprobs") and not logprobs:
            raise JudgeFailed(
                f"{self._shown} gives no log probabilities, which this recipe needs; use one whose judge is discrete"
            )
        return JudgeReply(text or "", logprobs, prompt, written, finish if isinstance(finish, str) else "")

    def _message(self, data: bytes) -> str:
        try:
            value = json.loads(data)
            error = value.get("error", value) if isinstance(value, dict) else value
            said = error.get("message", error) if isinstance(error, dict) else error
            return self._quoted(said if isinstance(said, str) else json.dumps(said))
        except (ValueError, RecursionError):
            return self._quoted(data[: 4 * MAX_QUOTE_CHARS].decode("utf-8", "replace"))

    def _quoted(self, text: str) -> str:
        """Return some plain characters of a text without the key, which a server may quote."""
        text = " ".join(text.split())
        return printable(text.replace(self._key, "***") if self._key else text)[:MAX_QUOTE_CHARS]


def _first_token(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return log probabilities of the first token's likeliest candidates; empty if missing or not numbers."""
    try:
        candidates = choice["logprobs"]["content"][0]["top_logprobs"]
        found = [(str(each["token"]), float(each["logprob"])) for each in candidates]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return {}
    return {token: value for token, value in reversed(found) if math.isfinite(value)}


def _retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date, which no endpoint of a model was seen to send."""
    return float(value) if value and re.fullmatch(r"\d{1,9}(\.\d{0,9})?", value) else None


# --- built-in judge for trials: no model, no network; its preferences mean nothing
# It prefers the answer with more words of the instruction, and among equals the longer one, up to a limit. It only reads the
# prompts of this package (judge_cache.py).

MAX_CHARS: Final = 600  # Length beyond this has no effect
WORD_WORTH_CHARS: Final = 2 * MAX_CHARS  # One word of the instruction outweighs any length
STEEPNESS: Final = 2.0 / WORD_WORTH_CHARS  # Slope of its log probabilities: one more word changes the odds by e^2
_PART = re.compile(
    r"^\[(?P<mark>[0-9a-f]{16}) instruction\]\n(?P<instruction>.*)^\[(?P=mark) first answer\]\n(?P<first>.*)"
    r"^\[(?P=mark) second answer\]\n(?P<second>.*)^\[(?P=mark) end\]$",
    re.DOTALL | re.MULTILINE,
)


class LengthAndWords:
    """The built-in judge. It never fails."""

    model = JudgeSpec.BUILTIN

    def __init__(self) -> None:
        self._asked = 0

    @property
    def usage(self) -> JudgeUsage:
        """Usage so far; requests cost nothing."""
        return JudgeUsage(requests=self._asked)

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]:
        """Return one verdict per conversation, `?` if the prompt is unreadable."""
        self._asked += len(conversations)
        return [_verdict(conversation[-1]["content"], logprobs) for conversation in conversations]

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """Do nothing, because nothing is cached."""


def _verdict(prompt: str, logprobs: int) -> Verdict:
    parts = _PART.search(prompt)
    if parts is None:
        return Verdict("?")
    first, second = (_worth(parts["instruction"], parts[name]) for name in ("first", "second"))
    if not logprobs:
        return Verdict("1" if first >= second else "2")
    odds = STEEPNESS * (second - first)
    return Verdict("m" if odds <= 0 else "M", {"m": -math.log1p(math.exp(odds)), "M": -math.log1p(math.exp(-odds))})


def _worth(instruction: str, answer: str) -> float:
    wanted, given = (set(re.findall(r"[^\W\d_]{3,}", text.lower())) for text in (instruction, answer))
    return len(wanted & given) * WORD_WORTH_CHARS + min(len(answer.strip()), MAX_CHARS)

"""Judge models: the one behind an OpenAI-compatible endpoint, and how an experiment's judge is made.

Requests run side by side in threads; each is tried again after a passing trouble, with growing pauses. What an endpoint
answered is kept (judge_cache.py). When it can't be asked, `JudgeFailed` says why: never a loss or a win. Its key stands in a
file and in the request's header, and nowhere else.
"""

from __future__ import annotations

import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.scoring.giving_up import GivenUp, ended_by
from autorl_hpc.scoring.judge_cache import Answer, JudgeCache, request_key
from autorl_hpc.scoring.judge_wire import Endpoint, RequestRefused, TryAgain
from autorl_hpc.scoring.outcome import Judge, JudgeFailed, Verdict
from autorl_hpc.states import Fault

JUDGE_MODEL: Final = "judge_model"
"""The option of a recipe that names its judge; filled in at launch, or set by a task that has one of its own."""
JUDGE_REVISION: Final = "judge_revision"
"""The option that holds the experiment's `judge.revision`; filled in at launch."""
FIRST_PAUSE_S: Final = 1.0
"""After the first failure; it doubles with each further one."""
MAX_PAUSE_S: Final = 120.0
"""Longest pause before a request is tried again, also where the endpoint asks for a longer one."""
MAX_REFUSALS: Final = 10
"""If so many conversations were refused before one was answered, the request itself is wrong, not the conversations."""
MAX_KEY_BYTES: Final = 4096
_LOOK_S = 0.2


@dataclass(frozen=True)
class Usage:
    """What a judge was asked so far.

    Attributes:
        requests: sent, tries that failed included.
        cached: answers that had been given before and cost nothing.
        cost: by the experiment's prices; None without them.
    """

    requests: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    def since(self, before: Usage) -> dict[str, float]:
        """The difference, as metrics of an evaluation."""
        names = ("requests", "cached", "prompt_tokens", "completion_tokens")
        found = {f"judge_{name}": float(getattr(self, name) - getattr(before, name)) for name in names}
        return found if self.cost is None else {**found, "judge_cost": self.cost - (before.cost or 0.0)}


class MeteredJudge(Judge, Protocol):
    """A judge that counts what it was asked."""

    @property
    def usage(self) -> Usage: ...


def make_judge(spec: JudgeSpec | None, name: str, cache: Path, revision: str | None = None) -> MeteredJudge:
    """The judge that a run's recipe names.

    Args:
        spec: the experiment's; the built-in judge needs none.
        cache: the folder where answers are kept.
        revision: the recipe's `judge_revision`.

    Raises:
        AutorlError: the experiment's judge is another one by now, or its key can't be read.
    """
    if name == JudgeSpec.BUILTIN:
        from autorl_hpc.scoring.toy_judge import LengthAndWords

        return LengthAndWords()
    if spec is None or spec.name != name:
        raise AutorlError(
            f"field `judge`: this run's recipe asks the judge {name}, the experiment's is "
            + ("none" if spec is None else spec.name),
            fault=Fault.CLUSTER,
            next_step=f"launch again with `judge.model: {name}`",
        )
    if spec.revision != revision:
        raise AutorlError(
            f"field `judge.revision`: this run's recipe asks the judge {name} at revision {revision or 'unsaid'}, the "
            f"experiment's is {spec.revision or 'unsaid'}",
            fault=Fault.CLUSTER,
            next_step="launch again with the run's `judge.revision`, or this judge under another name of the experiment",
        )
    return HttpJudge(spec, JudgeCache(cache))


def read_key(spec: JudgeSpec) -> str | None:
    """The judge's key, None where none is needed. No error shows any of it.

    Raises:
        AutorlError: the file can't be read, is open to others, or holds no key.
    """
    if spec.key_file is None:
        return None
    path = Path(spec.key_file).expanduser()
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise AutorlError(
            f"field `judge.key_file`: the judge's key can't be read: {error.strerror}",
            where=path,
            next_step="put the key alone into this file, for its owner alone (chmod 600)",
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise AutorlError(
            f"field `judge.key_file`: others may read the judge's key (mode {stat.S_IMODE(mode):04o})",
            where=path,
            next_step=f"run: chmod 600 {path}",
        )
    key = data.decode("ascii", "replace").strip()
    if len(data) > MAX_KEY_BYTES or not re.fullmatch(r"[!-~]+", key):
        raise AutorlError(
            "field `judge.key_file`: this file holds no key",
            where=path,
            next_step="put the key alone into it, without quotes or a name before it",
            exit_code=Exit.USAGE,
        )
    return key


class HttpJudge:
    """A judge behind an OpenAI-compatible endpoint.

    Args:
        cache: None: nothing is kept.
        first_pause_s: see `FIRST_PAUSE_S`.
    """

    def __init__(self, spec: JudgeSpec, cache: JudgeCache | None, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.spec = spec
        self.cache = cache
        self.first_pause_s = first_pause_s
        names = (spec.name, *((spec.answers_as,) if spec.answers_as else ()))
        self._endpoint = Endpoint(spec.url, read_key(spec), spec.timeout_s, names)
        self._lock = threading.Lock()
        self._not_before = 0.0  # the endpoint asked all of us to wait
        self._requests = self._cached = self._prompt_tokens = self._completion_tokens = 0

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def usage(self) -> Usage:
        """So far."""
        with self._lock:
            cost = None
            if self.spec.price_in is not None or self.spec.price_out is not None:
                tokens_in, tokens_out = self._prompt_tokens, self._completion_tokens
                cost = (tokens_in * (self.spec.price_in or 0.0) + tokens_out * (self.spec.price_out or 0.0)) / 1e6
            return Usage(self._requests, self._cached, self._prompt_tokens, self._completion_tokens, cost)

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]:
        """The verdicts on all conversations, in order.

        Raises:
            JudgeFailed: after retries, and at once where no try can help.
        """
        bodies = [self._body(conversation, max_tokens, logprobs) for conversation in conversations]
        keys = [request_key(body, self.spec.url, self.spec.revision) for body in bodies]
        wanted = dict(zip(keys, bodies, strict=True))  # the same request is sent once
        found: dict[str, Answer] = {}
        for key in wanted:
            known = self.cache.get(key) if self.cache else None
            if known is not None and (known.logprobs or not logprobs):
                found[key] = known
        with self._lock:
            self._cached += len(found)
        missing = [key for key in wanted if key not in found]
        batch = _Batch(answered=bool(found))
        refused: dict[str, str] = {}

        def work(key: str) -> None:
            try:
                found[key] = self._patiently(wanted[key], key, batch)
            except RequestRefused as error:
                refused[key] = str(error)
                batch.refuse(str(error))

        _side_by_side(work, missing, self.spec.concurrency, batch)
        return [
            Verdict("", refused=refused[key])
            if key in refused
            else Verdict(found[key].text, found[key].logprobs, cut_off=found[key].cut_off, key=key)
            for key in keys
        ]

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """See the Protocol."""
        for verdict in verdicts:
            if self.cache and verdict.key:
                self.cache.forget(verdict.key)

    def _body(self, conversation: Sequence[Mapping[str, str]], max_tokens: int, logprobs: int) -> dict[str, Any]:
        body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, **self.spec.parameters}
        body = {name: value for name, value in body.items() if value is not None}
        # Half of a surrogate pair, which a tokenizer can decode to, is no text that can be sent or hashed.
        messages = [
            {name: text.encode("utf-8", "replace").decode() for name, text in turn.items()} for turn in conversation
        ]
        body |= {"model": self.spec.name, "messages": messages}
        return {**body, "logprobs": True, "top_logprobs": logprobs} if logprobs else body

    def _patiently(self, body: Mapping[str, Any], key: str, batch: _Batch) -> Answer:
        """The answer to one request, tried again as often as the experiment says. Raises RequestRefused, JudgeFailed, _Ended."""
        for attempt in range(self.spec.retries + 1):
            batch.wait(self._not_before - time.monotonic())
            self._count_request()
            try:
                answer = self._endpoint.ask(body)
            except TryAgain as error:
                if attempt == self.spec.retries:
                    raise JudgeFailed(f"{error}, tried {attempt + 1} times") from None
                pause_s = min(MAX_PAUSE_S, self.first_pause_s * 2**attempt) * random.uniform(0.5, 1.0)
                if error.after_s is not None:
                    pause_s = min(MAX_PAUSE_S, max(error.after_s, pause_s))
                    self._not_before = max(self._not_before, time.monotonic() + pause_s)
                batch.wait(pause_s)
                continue
            batch.answered = True
            with self._lock:
                if not batch.ending.is_set():  # else it would count as the next evaluation's
                    self._prompt_tokens += answer.prompt_tokens
                    self._completion_tokens += answer.completion_tokens
            if self.cache and answer.lasting:
                self.cache.put(key, answer)
            return answer
        raise AssertionError("the last try answers or raises")

    def _count_request(self) -> None:
        with self._lock:
            limit = self.spec.max_requests
            if limit is not None and self._requests >= limit:
                raise JudgeFailed(
                    f"this grader has sent the judge {limit} requests, all that `judge.max_requests` allows"
                )
            self._requests += 1


class _Ended(Exception):
    """Another thread's failure has ended the batch."""


@dataclass
class _Batch:
    """What the threads of one `ask` share."""

    answered: bool
    ending: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    _refused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, seconds: float) -> None:
        """A pause that a failure elsewhere cuts short. Raises _Ended."""
        if self.ending.wait(max(0.0, seconds)):
            raise _Ended

    def refuse(self, why: str) -> None:
        """Counts a refused conversation. Raises JudgeFailed when there are only such."""
        with self._lock:
            self._refused += 1
            if self._refused >= MAX_REFUSALS and not self.answered:
                raise JudgeFailed(why)

    def fail(self, error: BaseException) -> None:
        """Ends the batch; the first failure is told."""
        with self._lock:
            self.failure = self.failure or error
        self.ending.set()


def _side_by_side(work: Callable[[str], None], keys: Sequence[str], at_once: int, batch: _Batch) -> None:
    """Does all the work in threads, until it is done or one fails; then its exception is raised.

    Daemon threads, unlike those of an executor: a grader that is asked to stop does not wait for an answer under way.
    """
    waiting = list(reversed(keys))

    def run() -> None:
        while not batch.ending.is_set():
            try:
                key = waiting.pop()
            except IndexError:
                return
            try:
                work(key)
            except _Ended:
                return
            except BaseException as error:
                batch.fail(error)

    threads = [threading.Thread(target=run, name="judge", daemon=True) for _ in range(min(at_once, len(keys)))]
    try:
        with ended_by(lambda: batch.fail(GivenUp("the judge's answers are no longer waited for"))):
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and not batch.ending.is_set():
                    thread.join(_LOOK_S)
    finally:
        batch.ending.set()
    if batch.failure is not None:
        raise batch.failure

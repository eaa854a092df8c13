"""The episode scheduler (`run_episodes`), and an encoder that tokenizes growing texts incrementally (`Encoder`). A `Streaming`
engine gets each prompt at once, any other engine batches. With a greedy engine and deterministic environments, results don't
depend on timing, workers or other episodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from autorl_hpc.rollouts.engine import CONVERSATION, Answer, Streaming
from autorl_hpc.rollouts.environment import Episode, Live, Transcript, Turn
from autorl_hpc.rollouts.pool import Lost, Note, Pool, Reply
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

if TYPE_CHECKING:
    from autorl_hpc.records.task import Sampling

GATHER_S = 1.0
"""How long a batch waits for slow environments after the first is ready: about a batch's duration, so at most half is lost."""
IN_FLIGHT = 256  # Parallel episodes: enough to fill a GPU; each has an environment in some worker's memory
MAX_BEGINNINGS = 3  # Attempts at one episode. If it killed a worker three times, this is no accident.
MAX_LOSSES = 12
"""Lost workers and failed calls in one run. An environment that always fails should end the run soon, not after hours of
retries."""


class Answers(Protocol):
    """The part of an engine that episodes need; agents write one for the model that they train. It may be `Streaming` too."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt, begun as the tokenizer begins a text."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Return the token ids of a conversation with generation prompt; None if the model has no template."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Return one answer per prompt, in order."""


def run_episodes(
    engine: Answers,
    goals: Sequence[Mapping[str, Any]],
    source: Source,
    sampling: Sampling,
    *,
    max_steps: int,
    seed: int = 0,
    workers: int = 2,
    pool: Pool | None = None,
    in_flight: int = IN_FLIGHT,
    gather_s: float = GATHER_S,
    max_prompt_tokens: int | None = None,
    all_or_none: bool = False,
) -> list[Episode]:
    """Play one episode per goal and return the results in the goals' order. A goal is a JSON object with an `id`.
    `pool`: a running pool of the same source, else one with `workers` processes is created. `gather_s`: how long ready episodes
    wait for slow ones, if the engine is not `Streaming`. `max_prompt_tokens`: an episode with a longer prompt ends with its current
    reward. `all_or_none`: stop at the first episode that can have no reward. Raises EnvironmentBroken, and the engine's own errors.
    """
    if max_steps > CONVERSATION:
        raise ValueError(f"max_steps is {max_steps}: {CONVERSATION} at most")
    with Pool(source, workers) if pool is None else nullcontext(pool) as where:
        run = _Run(engine, goals, where, sampling, max_steps, seed, gather_s, max_prompt_tokens, all_or_none)
        return run.play(in_flight)


@dataclass
class _Run:
    engine: Answers
    goals: Sequence[Mapping[str, Any]]
    pool: Pool
    sampling: Sampling
    max_steps: int
    seed: int
    gather_s: float
    max_prompt_tokens: int | None
    all_or_none: bool
    _live: dict[int, Live] = field(default_factory=dict)  # by slot
    _waiting: dict[int, Live] = field(default_factory=dict)  # by ticket
    _asked: dict[int, Live] = field(default_factory=dict)  # by key
    _ready: list[Live] = field(default_factory=list)
    _finished: dict[int, Episode] = field(default_factory=dict)
    _next: int = 0
    _losses: int = 0
    _errors: int = 0

    def play(self, in_flight: int) -> list[Episode]:
        try:
            for slot in range(min(max(1, in_flight), len(self.goals))):
                self._begin_next(slot)
            if isinstance(self.engine, Streaming):
                self._stream(self.engine)
            else:
                while self._live:
                    self._gather()
                    asked = self._prompts()
                    tokens = [tokens for _, tokens in asked]
                    answers = self.engine.generate(tokens, self.sampling, self.seed) if asked else []
                    for (live, _), answer in zip(asked, answers, strict=True):
                        self._hand_on(live, answer)
            return [self._finished[index] for index in range(len(self.goals))]
        finally:
            for slot in self._live:  # after an exception
                self.pool.release(slot)

    def _stream(self, engine: Streaming) -> None:
        stream = engine.stream(self.sampling, self.seed, lambda key, answer: self.pool.post(Note(self, key, answer)))
        try:
            while self._live:
                keyed: list[tuple[int, list[int]]] = []
                for live, tokens in self._prompts():
                    live.key = live.next_key()
                    self._asked[live.key] = live
                    keyed.append((live.key, tokens))
                if keyed:
                    stream.ask(keyed)
                if self._hear(None):
                    for _ in range(len(self._live)):  # bounded, so that prompts are submitted
                        if not self._hear(0.0):
                            break
        finally:
            stream.close()

    def _gather(self) -> None:
        """Wait until all episodes are ready, or some have been ready for `gather_s`."""
        deadline: float | None = None
        while self._waiting:
            if self._ready and deadline is None:
                deadline = time.monotonic() + self.gather_s
            if not self._hear(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return

    def _hear(self, timeout_s: float | None) -> bool:
        """Handle the next event; False if there was none in time."""
        event = self.pool.hear(timeout_s)
        if isinstance(event, Lost):
            self._lost(event)
        elif isinstance(event, Note):
            if event.sender is self:  # else from an earlier, abandoned run
                self._answered(event)
        # else from an abandoned call
        elif event is not None and (live := self._waiting.pop(event.ticket, None)) is not None:
            self._take(live, event)
        return event is not None

    def _begin_next(self, slot: int) -> None:
        if self._next < len(self.goals):
            self._live[slot] = Live(self._next, slot)
            self._next += 1
            self._begin(self._live[slot])

    def _begin(self, live: Live) -> None:
        live.clear()
        self._wait(live, self.pool.begin(live.slot, self.goals[live.index], self.seed))

    def _wait(self, live: Live, ticket: int) -> None:
        self._waiting.pop(live.ticket, None)
        live.ticket = ticket
        self._waiting[ticket] = live

    def _take(self, live: Live, reply: Reply) -> None:
        if reply.error is not None:
            self._errors += 1
            if self._errors > MAX_LOSSES:
                raise EnvironmentBroken(f"{self._errors} calls failed in one run; the last one: {reply.error}")
            self._again(live, f"the environment failed: {reply.error}", last=reply.final)
            return
        live.prompt = reply.prompt
        if not live.begun:
            live.begun, live.transcript = True, Transcript(self.goals[live.index], reply.observation)
        else:
            live.transcript.turns.append(Turn(reply.action, reply.observation))
            live.reward, live.done = reply.reward, reply.done
        live.ticket = 0
        if live.done or len(live.transcript.turns) >= self.max_steps:
            self._finish(live, live.reward)
        else:
            self._ready.append(live)

    def _lost(self, lost: Lost) -> None:
        """Begin all episodes of a lost worker again; only the one that it was working on counts as an attempt."""
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise EnvironmentBroken(f"{self._losses} workers were lost in one run; the last one: {lost.reason}")
        for live in [self._live[slot] for slot in lost.slots if slot in self._live]:
            guilty = live.ticket == lost.ticket
            self._waiting.pop(live.ticket, None)
            if live in self._ready:
                self._ready.remove(live)
            if guilty:
                self._again(live, lost.reason)
            else:
                self._begin(live)

    def _again(self, live: Live, reason: str, last: bool = False) -> None:
        if last or live.beginnings >= MAX_BEGINNINGS:
            times = "once" if live.beginnings == 1 else f"{live.beginnings} times"
            self._finish(live, None, f"{reason}; begun {times}")
        else:
            live.beginnings += 1
            self._begin(live)

    def _answered(self, note: Note) -> None:
        if isinstance(note.content, BaseException):
            raise note.content
        live = self._asked.pop(note.key, None)
        if live is not None and live.key == note.key:  # otherwise its environment was lost meanwhile
            live.key = None
            self._hand_on(live, note.content)

    def _hand_on(self, live: Live, answer: Answer) -> None:
        live.tokens += answer.tokens
        live.truncated += answer.truncated
        live.completions.append(answer.text)
        last = len(live.completions) >= self.max_steps
        self._wait(live, self.pool.act(live.slot, answer.text, last=last))

    def _prompts(self) -> list[tuple[Live, list[int]]]:
        """Return all ready episodes with their prompts' token ids, in the goals' order. Episodes with too long prompts end."""
        ready, self._ready = sorted(self._ready, key=lambda live: live.index), []
        asked: list[tuple[Live, list[int]]] = []
        for live in ready:
            prompt: Any = live.prompt or ""
            chat = None if isinstance(prompt, str) else self.engine.chat(prompt)
            if chat is None and not isinstance(prompt, str):  # without a template
                prompt = "\n\n".join(message["content"] for message in prompt)
            tokens = self.engine.encode(prompt) if chat is None else chat
            if not live.completions:
                live.first_prompt = tuple(tokens)
            if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
                self._finish(live, live.reward, "the prompt is longer than the recipe allows")
            else:
                asked.append((live, tokens))
        return asked

    def _finish(self, live: Live, reward: float | None, problem: str | None = None) -> None:
        goal = self.goals[live.index]
        if reward is None and self.all_or_none:
            raise EnvironmentBroken(f"episode {goal['id']}: {problem}")
        del self._live[live.slot]
        self._waiting.pop(live.ticket, None)
        self.pool.release(live.slot)
        self._finished[live.index] = live.over(goal, reward, problem)
        self._begin_next(live.slot)


# --- incremental tokenizing: growing texts are not tokenized as a whole at each turn
# A text is cut before each line feed that follows an ASCII letter or digit, and the pieces' ids are cached. This equals encoding
# the whole text if the tokenizer's definition splits there before it forms tokens; with other tokenizers whole texts are encoded.
KEPT_CHARS = 8_000_000
"""Characters of cached pieces (about 100 MB with ids) after which the cache is cleared. A split's episodes use a tenth of it."""
_LINE_END = re.compile(r"\n(?<=[0-9A-Za-z]\n)")
NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
SPLITS = {
    # cl100k and Llama 3; Qwen 2; DeepSeek (three rules); the tiny model
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    r"\d{1,2}",
}
"""Regular expressions by which tokenizers split texts first; all were checked for the property above."""


def beginning(tokenizer: Any) -> list[int]:
    """Return the token ids that a transformers tokenizer puts before a text (BOS), not those that it puts after one."""
    whole, plain = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (True, False))
    places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    return whole[: places[0]] if places else []


class Encoder:
    """Encodes plain text like a transformers tokenizer, without special tokens. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.by_pieces = splits_at_line_ends(tokenizer)
        self._ids: dict[str, list[int]] = {}
        self._kept_chars = 0

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, always equal to those of encoding it as a whole."""
        if not self.by_pieces:
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        ids: list[int] = []
        for piece in pieces(text):
            kept = self._ids.get(piece)
            ids += self._encode(piece) if kept is None else kept
        return ids

    def _encode(self, piece: str) -> list[int]:
        made: list[int] = self._tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids
        if self._kept_chars + len(piece) > KEPT_CHARS:
            self._ids, self._kept_chars = {}, 0
        self._ids[piece] = made
        self._kept_chars += len(piece)
        return made


def pieces(text: str) -> list[str]:
    """Cut the text before each line feed that follows an ASCII letter or digit."""
    cuts = [0, *(found.start() for found in _LINE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def splits_at_line_ends(tokenizer: Any) -> bool:
    """Return whether `pieces` is valid for a tokenizer by its definition; False if that is unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return False
    try:
        made: dict[str, Any] = json.loads(backend.to_str())
    except Exception:  # a tokenizer with parts in Python has no definition
        return False
    model = made.get("model") or {}
    return (
        made.get("truncation") is None
        and made.get("padding") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(each.get("type") in NORMAL_FORMS for each in _parts(made.get("normalizer"), "normalizers"))
        and _splitting(_parts(made.get("pre_tokenizer"), "pretokenizers"))
        and not any(_over_a_line_end(token) for token in made.get("added_tokens") or [])
    )


def _splitting(rules: list[Mapping[str, Any]]) -> bool:
    splits = False
    for rule in rules:
        if rule.get("type") == "ByteLevel":
            if rule.get("add_prefix_space"):
                return False
            splits |= bool(rule.get("use_regex", True))
        elif rule.get("type") == "Split":
            regex = (rule.get("pattern") or {}).get("Regex")
            if regex not in SPLITS or rule.get("behavior") != "Isolated" or rule.get("invert"):
                return False
            splits |= r"\s+(?!\S)" in regex
        elif rule.get("type") != "Digits":
            return False
    return splits


def _parts(rule: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if rule is None:
        return []
    return [part for each in rule[name] for part in _parts(each, name)] if rule.get("type") == "Sequence" else [rule]


def _over_a_line_end(token: Mapping[str, Any]) -> bool:
    content = str(token.get("content", ""))
    last = content[-1:]
    return "\n" in content or (bool(token.get("rstrip")) and last.isalnum() and last.isascii())

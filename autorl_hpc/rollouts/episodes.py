"""The episode scheduler: all episodes are played together.

An engine that is `Streaming` is asked as soon as an environment is ready, and each answer goes to its environment as it comes.
Any other engine is asked in batches of all that are ready.

An episode's prompts depend on its own transcript alone. With a greedy engine and deterministic environments its outcome is
therefore the same whatever the timing, the number of workers and the other episodes. With sampling a stream's draws follow from
goal, beginning and turn; a batch's depend on the batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autorl_hpc.rollouts.engine import CONVERSATION, Answer, Stream, Streaming
from autorl_hpc.rollouts.environment import Episode, Live, Transcript, Turn
from autorl_hpc.rollouts.pool import Lost, Note, Pool, Reply
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

if TYPE_CHECKING:
    from autorl_hpc.records.task import Sampling

GATHER_S = 1.0
"""How long a batch waits for slow environments once the first is ready: about what a batch takes, so at most half is lost."""

IN_FLIGHT = 256
"""Episodes at a time: a batch that fills a GPU; an environment of each lives in some worker's memory."""

MAX_BEGINNINGS = 3
"""Of one episode. What killed a worker three times is no accident."""

MAX_LOSSES = 12
"""Workers lost in one run of episodes, and calls that raised. An environment that fails everywhere ends the run, not after hours of
new beginnings."""

MAX_MOVES = 3
"""Of one episode, away from others that are slow: then it waits."""

LOOK_S = 0.5
"""How often it is looked for episodes that wait behind slow ones."""


class Answers(Protocol):
    """The part of an engine that episodes need; agents write one over the model that they train. It may be `Streaming` too."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation with the answer's beginning, None where the model has no template."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """One answer a prompt, in order."""
        ...


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
    """One episode a goal, in the goals' order. A goal is a JSON object with an `id`.

    Args:
        pool: a warm one of the same source; without one a pool of `workers` processes is made for this run.
        in_flight: episodes at a time; a finished one makes room for the next goal at once.
        gather_s: a slow environment never keeps ready ones waiting for longer than this. Nothing is gathered for a `Streaming`
            engine.
        max_prompt_tokens: an episode whose prompt grows longer ends there, with the reward that it has.
        all_or_none: stop at the first episode that can have no reward.

    Raises:
        EnvironmentBroken: environment or dialogue can't be made, or fail one time after the other; with `all_or_none`, they
            failed in one episode.
        Exception: the engine's own.
    """
    if max_steps > CONVERSATION:
        raise ValueError(f"max_steps is {max_steps}: {CONVERSATION} at most")
    own = Pool(source, workers) if pool is None else None
    try:
        run = _Run(engine, goals, pool or own or Pool(source), sampling)
        run.all_or_none = all_or_none
        run.max_steps, run.seed, run.gather_s, run.max_prompt_tokens = max_steps, seed, gather_s, max_prompt_tokens
        return run.play(in_flight)
    finally:
        if own is not None:
            own.close()


@dataclass
class _Run:
    engine: Answers
    goals: Sequence[Mapping[str, Any]]
    pool: Pool
    sampling: Sampling
    max_steps: int = 1
    seed: int = 0
    gather_s: float = GATHER_S
    max_prompt_tokens: int | None = None
    all_or_none: bool = False
    _live: dict[int, Live] = field(default_factory=dict)  # by slot
    _waiting: dict[int, Live] = field(default_factory=dict)  # by ticket
    _asked: dict[int, Live] = field(default_factory=dict)  # by key
    _ready: list[Live] = field(default_factory=list)
    _finished: dict[int, Episode] = field(default_factory=dict)
    _next: int = 0
    _losses: int = 0
    _errors: int = 0
    _look_at: float = 0.0

    def play(self, in_flight: int) -> list[Episode]:
        try:
            for slot in range(min(max(1, in_flight), len(self.goals))):
                self._begin_next(slot)
            if isinstance(self.engine, Streaming):
                self._stream(self.engine)
            else:
                while self._live:
                    self._gather()
                    self._ask()
            return [self._finished[index] for index in range(len(self.goals))]
        finally:
            for slot in self._live:  # of a run that ends by an exception
                self.pool.release(slot)

    # --- waiting ---

    def _stream(self, engine: Streaming) -> None:
        """Asks for whatever is ready, waits for what comes, from environments and the engine, and takes all that is there."""
        stream = engine.stream(self.sampling, self.seed, lambda key, answer: self.pool.post(Note(self, key, answer)))
        try:
            while self._live:
                self._hand_in(stream)
                if self._hear(LOOK_S):
                    for _ in range(len(self._live)):  # bounded: prompts must leave
                        if not self._hear(0.0):
                            break
        finally:
            stream.close()

    def _gather(self) -> None:
        """Waits until all episodes are ready, or some have been for `gather_s`."""
        deadline: float | None = None
        while self._waiting:
            if self._ready and deadline is None:
                deadline = time.monotonic() + self.gather_s
            left = LOOK_S if deadline is None else deadline - time.monotonic()
            if not self._hear(min(LOOK_S, max(0.0, left))) and left <= 0.0:
                return

    def _hear(self, timeout_s: float) -> bool:
        """Takes the next event, False if there was none in time."""
        event = self.pool.hear(timeout_s)
        if isinstance(event, Lost):
            self._lost(event)
        elif isinstance(event, Note):
            if event.sender is self:  # else of a run that was given up
                self._answered(event)
        elif event is not None and (live := self._waiting.pop(event.ticket, None)) is not None:  # else the same
            self._take(live, event)
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_S
            for slot in self.pool.held_up():
                self._move(slot)
        return event is not None

    # --- the environments' side ---

    def _begin_next(self, slot: int) -> None:
        if self._next < len(self.goals):
            self._live[slot] = Live(self._next, slot)
            self._next += 1
            self._begin(self._live[slot])

    def _begin(self, live: Live) -> None:
        """Begins an episode, or begins it again from nothing."""
        live.clear()
        self._wait(live, self.pool.begin(live.slot, self.goals[live.index], self.seed))

    def _wait(self, live: Live, ticket: int) -> None:
        self._waiting.pop(live.ticket, None)
        live.ticket = ticket
        self._waiting[ticket] = live

    def _act(self, live: Live) -> None:
        """The model's last words go to the environment."""
        last = len(live.completions) >= self.max_steps
        self._wait(live, self.pool.act(live.slot, live.completions[-1], last=last))

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
        if live.known is not None:
            self._replay(live, live.known)
            return
        live.ticket = 0
        if live.done or len(live.transcript.turns) >= self.max_steps:
            self._finish(live, live.reward)
        else:
            self._ready.append(live)

    def _move(self, slot: int) -> None:
        """An episode that waits behind a slow one is begun elsewhere and played up to where it stands by the same words."""
        live = self._live.get(slot)
        if live is None or live.ticket not in self._waiting or live.moves >= MAX_MOVES:
            return
        live.moves += 1
        live.begun, live.known = False, live.known or live.transcript
        self._wait(live, self.pool.begin(slot, self.goals[live.index], self.seed))

    def _replay(self, live: Live, known: Transcript) -> None:
        """The next of the known turns. An environment that tells another story now has its episode begun from nothing."""
        turns = live.transcript.turns
        if live.transcript.first != known.first or turns != known.turns[: len(turns)]:
            self._begin(live)
        elif len(turns) < len(known.turns):
            self._wait(live, self.pool.act(live.slot, live.completions[len(turns)], last=True))
        else:
            live.known = None
            self._act(live)

    def _lost(self, lost: Lost) -> None:
        """All episodes of a lost worker begin again; only the one that it was at is counted."""
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

    # --- the engine's side ---

    def _ask(self) -> None:
        """One batch: the prompts of all that are ready, in the goals' order."""
        asked = self._prompts()
        if asked:
            answers = self.engine.generate([tokens for _, tokens in asked], self.sampling, self.seed)
            for (live, _), answer in zip(asked, answers, strict=True):
                self._hand_on(live, answer)

    def _hand_in(self, stream: Stream) -> None:
        """The prompts of all that are ready, at once."""
        keyed: list[tuple[int, list[int]]] = []
        for live, tokens in self._prompts():
            live.key = live.next_key()
            self._asked[live.key] = live
            keyed.append((live.key, tokens))
        if keyed:
            stream.ask(keyed)

    def _answered(self, note: Note) -> None:
        if isinstance(note.content, BaseException):
            raise note.content
        live = self._asked.pop(note.key, None)
        if live is not None and live.key == note.key:  # else its environment was lost meanwhile
            live.key = None
            self._hand_on(live, note.content)

    def _hand_on(self, live: Live, answer: Answer) -> None:
        live.tokens += answer.tokens
        live.truncated += answer.truncated
        live.completions.append(answer.text)
        self._act(live)

    def _prompts(self) -> list[tuple[Live, list[int]]]:
        """All that are ready, with their prompts' token ids, in the goals' order; those that grew too long end."""
        ready, self._ready = sorted(self._ready, key=lambda live: live.index), []
        asked: list[tuple[Live, list[int]]] = []
        for live in ready:
            tokens = self._tokens(live)
            if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
                self._finish(live, live.reward, "the prompt is longer than the recipe allows")
            else:
                asked.append((live, tokens))
        return asked

    def _tokens(self, live: Live) -> list[int]:
        prompt = live.prompt or ""
        if isinstance(prompt, str):
            return self.engine.encode(prompt)
        tokens = self.engine.chat(prompt)
        return self.engine.encode("\n\n".join(m["content"] for m in prompt)) if tokens is None else tokens

    def _finish(self, live: Live, reward: float | None, problem: str | None = None) -> None:
        goal = self.goals[live.index]
        if reward is None and self.all_or_none:
            raise EnvironmentBroken(f"episode {goal['id']}: {problem}")
        del self._live[live.slot]
        self._waiting.pop(live.ticket, None)
        self.pool.release(live.slot)
        self._finished[live.index] = live.over(goal, reward, problem)
        self._begin_next(live.slot)


# Token ids of texts that grow, without cutting all of them into tokens again at each turn.
#
# A text is cut before each line feed that follows on an ASCII letter or digit, the pieces are encoded alone, and their ids are
# kept. That equals encoding the whole text wherever a tokenizer splits there before it forms tokens. Whether it does is read from
# its definition: normal forms or nothing before, the splitting rules of the families below, byte-level BPE without dropout, and
# no added token over such a place. None of these rules puts a letter or digit and a line feed into one part, and none looks
# past that place. With any other tokenizer (SentencePiece's, say) whole texts are encoded.

KEPT_CHARS = 8_000_000
"""Of pieces, about 100 MB with their ids; then the cache begins anew. A split's episodes have a tenth of it."""

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
"""Regular expressions by which tokenizers split texts first, all looked at for the sentence above."""


class Encoder:
    """A transformers tokenizer's `encode`: plain text to token ids, no special tokens added. Safe for several threads.

    Attributes:
        by_pieces: whether texts are encoded piece by piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.by_pieces = splits_at_line_ends(tokenizer)
        self._ids: dict[str, list[int]] = {}
        self._kept_chars = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, always those of encoding it as a whole."""
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
    """The text cut before each line feed that follows on an ASCII letter or digit."""
    lines = text.split("\n")
    made, start = [], 0
    for place, line in enumerate(lines):
        last = line[-1:]
        if last.isalnum() and last.isascii() and place + 1 < len(lines):
            made.append(
                "\n".join(lines[start : place + 1]) if start == 0 else "\n" + "\n".join(lines[start : place + 1])
            )
            start = place + 1
    made.append("\n".join(lines[start:]) if start == 0 else "\n" + "\n".join(lines[start:]))
    return made


def splits_at_line_ends(tokenizer: Any) -> bool:
    """Whether texts may be encoded by `pieces`, as far as the tokenizer's definition shows; False where it doesn't."""
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
    """Whether these rules, one after the other, split before a line feed after a letter or digit."""
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

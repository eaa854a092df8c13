"""Sampling with a cache that lives as long as the conversations: a turn costs its own new tokens, and beginnings in common are
computed once.

For models of Llama's kind, as large as their cache leaves room for: `open_rows`. It answers as `Sampler` does, draws included,
and streams. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import same_beginning
from decoder import Decoder, unlike
from sampler import Draws, Sampler
from words import Answer, Words, said

ROWS = 256
CACHE_SHARE = 0.35
"""Of a GPU's memory: for the cache of all rows."""
CACHE_CPU_BYTES = 1 << 30
STEPS = 3
"""Tokens between two looks at what has come: few, since an answer has about eight."""
KINDS = 8
"""Prompts that have little in common with any row's, and so are computed before others that may begin alike; at a time."""
IDLE_S = 0.001
SWITCH_S = 0.0002
"""How long another thread of Python's may hold this one up, while a stream is open."""
CHECKED_TOKENS, CHECKED_GAP = 96, 0.1
"""How far, on average, log-probabilities may lie from transformers' for the decoder to be used at all."""
NEEDED_WIDTH = 2048
"""Columns that a cache must be able to have: else few prompts would fit."""


def open_rows(model: Any, words: Words, *, max_new_tokens: int, rows: int = ROWS, half: bool) -> RowSampler | None:
    """A sampler over a copy of the model; None where it isn't of that kind, its cache is too large, or it computes another thing than
    transformers: the reason is in the log then."""
    reason = unlike(model.config) or ("stop strings of several tokens" if words.long_stops else None)
    if reason is None:
        try:
            sampler = RowSampler(model, words, max_new_tokens, rows, half=half)
            reason = sampler.check(model)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:500]
    if reason is not None:
        print(f"no sampler by rows: {reason}", flush=True)
        return None
    return sampler


@dataclass(eq=False)
class _Row:
    """What is known of a row.

    Attributes:
        ids: tokens whose keys and values are in it.
        conversation: whose they are; None: nobody's.
        request: what it answers now.
        used: when it was asked last, by a count.
    """

    number: int
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    conversation: int | None = None
    request: _Request | None = None
    used: int = 0


@dataclass(eq=False)
class _Request:
    key: int
    prompt: np.ndarray
    conversation: int | None
    row: _Row | None = None


class RowSampler:
    """Answers as `Sampler` does, with the same draws.

    Attributes:
        turns: a conversation's most, where keys of a stream count conversations and turns in them; None: they do not.
    """

    def __init__(self, model: Any, words: Words, max_new_tokens: int, rows: int, *, half: bool) -> None:
        self.words, self.max_new_tokens, self.temperature, self.rows = words, max_new_tokens, 0.0, rows
        self.turns: int | None = None
        self._draws = Draws(max_new_tokens)
        ending = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        ending[[token for token in {*words.ends, *words.stopping()} if token < model.config.vocab_size]] = True
        self.decoder = Decoder(model, rows, max_new_tokens, torch.bfloat16 if half else torch.float32, ending)
        room = CACHE_CPU_BYTES
        if self.decoder.device.type == "cuda":
            room = int(CACHE_SHARE * torch.cuda.get_device_properties(self.decoder.device).total_memory)
        self._widest = min(int(model.config.max_position_embeddings) + 1, room // (rows * self.decoder.bytes_a_token))
        if self._widest < min(NEEDED_WIDTH, int(model.config.max_position_embeddings)):
            raise ValueError(f"{rows} rows of {self._widest} tokens are all that fits")
        self._model = model
        self._spare: Sampler | None = None
        self.decoder.take(model.named_parameters())
        self.forget()

    encode = property(lambda self: self.words.encode)
    chat = property(lambda self: self.words.chat)

    def begin(self, seed: int, temperature: float) -> None:
        """As `Sampler.begin`; what is cached is forgotten."""
        self.temperature = temperature
        self._draws.begin(seed, temperature)
        self.forget()

    def forget(self) -> None:
        """Nothing that is cached counts any more: the weights are others."""
        self._rows = [_Row(number) for number in range(self.decoder.rows)]
        self._talks: dict[int, _Row] = {}
        self._same: dict[int, _Row] = {}  # by a prompt's hash: where it was begun last
        self._clock = itertools.count(1)
        self._waiting: list[_Request] = []

    def take(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Other weights of the same model."""
        self.decoder.take(weights)
        self.forget()

    def update(self, folder: Path) -> None:
        """Weights from a folder of safetensors."""
        from safetensors.torch import load_file

        self.take(item for path in sorted(folder.glob("*.safetensors")) for item in load_file(path).items())

    def check(self, model: Any) -> str | None:
        """Whether log-probabilities are those of transformers; what is wrong, or None."""
        draw = np.random.default_rng(0)
        prompt = draw.integers(0, model.config.vocab_size, size=CHECKED_TOKENS).tolist()
        self.begin(0, 0.0)
        (answer,) = self.generate([prompt])
        ids = [*prompt, *answer.text.ids.tolist()]
        device = self.decoder.device
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.decoder.dtype == torch.bfloat16):
            logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        wanted = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
        wanted = wanted.gather(1, torch.tensor(ids[len(prompt) :], device=device)[:, None])[:, 0].cpu().numpy()
        gap = float(np.abs(wanted - answer.text.logps).mean())
        print(f"sampler by rows: {self.decoder.rows} rows, gap to transformers {gap:.5f}", flush=True)
        return None if gap <= CHECKED_GAP else f"log-probabilities differ by {gap:.3f} on average"

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any = None, seed: int = 0) -> list[Answer]:
        """One answer a prompt, in order. `sampling` and `seed` are not used: see `begin`."""
        del sampling, seed
        found: dict[int, Answer] = {}
        for number, prompt in enumerate(prompts):
            self._waiting.append(_Request(number, np.asarray(prompt, np.int32), None))
        while len(found) < len(prompts):
            found |= dict(self.work())
        return [found[number] for number in range(len(prompts))]

    def stream(self, sampling: Any, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> RowStream:
        """Takes prompts while others are being answered: `autorl_rollouts.engine.Streaming`."""
        del sampling, seed
        return RowStream(self, deliver)

    def hand_in(self, key: int, prompt: Sequence[int]) -> None:
        """A prompt that is to be answered."""
        talk = None if self.turns is None else key // self.turns
        self._waiting.append(_Request(key, np.asarray(prompt, np.int32), talk))

    def work(self) -> list[tuple[int, Answer]]:
        """Begins what waits, goes on with all for some tokens, and returns what is answered."""
        answered = self._begin()
        live = [row.number for row in self._rows if row.request]
        if live:
            for _ in range(STEPS):
                self.decoder.step(self.temperature, live)
            answered += self._over()
        return answered

    def give_up(self) -> None:
        """Drops all that is not answered."""
        self._waiting = []
        for row in self._rows:
            row.request = None
        self.decoder.active.zero_()

    def _begin(self) -> list[tuple[int, Answer]]:
        waiting, self._waiting = self._waiting, []
        self._widen(waiting)
        long = [one for one in waiting if self._columns(one) > self._widest]
        fresh: list[_Request] = []
        going: list[_Request] = []
        firsts = 0
        for one in waiting:
            if self._columns(one) > self._widest:
                continue
            row = None if one.conversation is None else self._talks.get(one.conversation)
            if row is not None and row.request is None and row.conversation == one.conversation:
                self._seat(one, row)
                going.append(one)
            else:
                fresh.append(one)
        for one in fresh:
            row = self._free()
            if row is None:
                self._waiting.append(one)
                continue
            source, length = self._alike(one.prompt)
            alone = 2 * length < len(one.prompt) and firsts < KINDS
            if alone and going:  # what begins alike may be among those, not computed yet
                self._compute(going)
                going = []
                source, length = self._alike(one.prompt)
            if source is not row and length:
                self.decoder.copy(source.number, row.number, length)
            row.ids = one.prompt[:length]
            if row.conversation is not None:
                self._talks.pop(row.conversation, None)
            row.conversation = one.conversation
            self._same[hash(one.prompt.tobytes())] = row
            if one.conversation is not None:
                self._talks[one.conversation] = row
            self._seat(one, row)
            going.append(one)
            if alone and 2 * length < len(one.prompt):  # the first of its kind
                self._compute(going)
                going, firsts = [], firsts + 1
        self._compute(going)
        return self._beyond(long)

    def _columns(self, one: _Request) -> int:
        return len(one.prompt) + self.max_new_tokens + 1

    def _widen(self, requests: Sequence[_Request]) -> None:
        """A cache that takes these prompts, as far as there is room; its bounds follow what there is."""
        wanted = [columns for one in requests if (columns := self._columns(one)) <= self._widest]
        try:
            self.decoder.widen(max(wanted, default=0))
        except torch.OutOfMemoryError as error:
            print(f"the cache stays at {self.decoder.width} columns: {str(error)[:200]}", flush=True)
            self._widest = self.decoder.width

    def _seat(self, one: _Request, row: _Row) -> None:
        row.request, one.row, row.used = one, row, next(self._clock)

    def _compute(self, requests: Sequence[_Request]) -> None:
        """Keys and values of all but each prompt's last token; then they answer."""
        if not requests:
            return
        rows, starts, news = [], [], []
        for one in requests:
            row = one.row
            assert row is not None
            start = min(same_beginning(row.ids, one.prompt), len(one.prompt) - 1)
            row.ids = one.prompt[:-1]
            if start < len(one.prompt) - 1:
                rows.append(row.number)
                starts.append(start)
                news.append(one.prompt[start:-1])
        if rows:
            self.decoder.extend(rows, starts, news)
        draws = np.stack([self._draws.of(one.prompt) for one in requests])
        self.decoder.ask(
            [one.row.number for one in requests if one.row is not None],
            [int(one.prompt[-1]) for one in requests],
            [len(one.prompt) - 1 for one in requests],
            draws,
        )

    def _over(self) -> list[tuple[int, Answer]]:
        """What is answered by now; the one place where the device is waited for."""
        active, counts, tokens, logps = self.decoder.told()
        answered = []
        for row in self._rows:
            one = row.request
            if one is None or active[row.number]:
                continue
            row.request = None
            ids, known = (each[row.number, : counts[row.number]] for each in (tokens, logps))
            row.ids = np.concatenate([one.prompt, ids[:-1]]).astype(np.int32)  # the last one's keys are not computed
            text, closed = self.words.text(ids.tolist())
            answer = said(text, one.prompt, ids, known)
            answered.append((one.key, Answer(answer, len(ids), not closed)))
        return answered

    def _beyond(self, requests: Sequence[_Request]) -> list[tuple[int, Answer]]:
        """Prompts longer than the cache, by transformers."""
        if not requests:
            return []
        half = self.decoder.dtype == torch.bfloat16
        training = self._model.training
        if self._spare is None:
            self._spare = Sampler(self._model, self.words, max_new_tokens=self.max_new_tokens)
        self._spare.share(self._draws, self.temperature)
        self._model.eval()
        with torch.autocast(self.decoder.device.type, torch.bfloat16, enabled=half):
            answers = self._spare.generate([one.prompt.tolist() for one in requests])
        self._model.train(training)
        return [(one.key, answer) for one, answer in zip(requests, answers, strict=True)]

    def _free(self) -> _Row | None:
        """The row that was not used for the longest time."""
        free = [row for row in self._rows if row.request is None]
        return min(free, key=lambda row: row.used) if free else None

    def _alike(self, prompt: np.ndarray) -> tuple[_Row, int]:
        """The row whose beginning has the most in common with a prompt, and how much."""
        same = self._same.get(hash(prompt.tobytes()))
        if same is not None and same_beginning(same.ids, prompt) >= len(prompt) - 1:
            return same, len(prompt) - 1
        found = ((row, same_beginning(row.ids, prompt)) for row in self._rows if len(row.ids))
        row, length = max(found, key=lambda pair: pair[1], default=(self._rows[0], 0))
        return row, min(length, len(prompt) - 1)


class RowStream:
    """A thread that alone drives the sampler while it is open."""

    def __init__(self, sampler: RowSampler, deliver: Callable[[int, Answer | Exception], None]) -> None:
        self._sampler, self._deliver = sampler, deliver
        self._new: queue.SimpleQueue[tuple[int, Sequence[int]]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)
        self._thread.start()

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Hands prompts in, each with its key."""
        for each in prompts:
            self._new.put(each)

    def close(self) -> None:
        """Gives up what is not answered yet."""
        self._over.set()
        self._thread.join()
        self._sampler.give_up()
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        live = 0
        device = self._sampler.decoder.device
        try:
            if device.type == "cuda":  # a thread begins with the first one
                torch.cuda.set_device(device)
            while not self._over.is_set():
                while not self._new.empty():
                    self._sampler.hand_in(*self._new.get())
                    live += 1
                if not live:
                    time.sleep(IDLE_S)
                    continue
                for key, answer in self._sampler.work():
                    live -= 1
                    self._deliver(key, answer)
        except Exception as error:
            if not self._over.is_set():
                self._deliver(-1, error)

"""Batched sampling from a causal model by transformers, on a CPU or a GPU, with the tokens and log-probabilities that RL needs.

It answers as `run_episodes` of autorl_rollouts asks (`encode`, `chat`, `generate`); so does `sampler_vllm.py`. Copied into
`code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from words import Answer, Words, said

BATCH_TOKENS_CPU = 16_384
CACHE_SHARE = 0.2
"""Of a GPU's memory: for the keys and values of one batch."""
TAIL_TOKENS = 16
"""A stop string of several tokens is looked for in so many of the last ones."""


class Draws:
    """Uniform numbers by seed, prompt, and how often it was asked since `begin`."""

    def __init__(self, most: int) -> None:
        self._most, self._seed, self._temperature, self._asked = most, 0, 0.0, Counter[bytes]()

    def begin(self, seed: int, temperature: float) -> None:
        """Nothing was asked yet."""
        self._seed, self._temperature = seed, temperature
        self._asked.clear()

    def of(self, prompt: Sequence[int] | np.ndarray) -> np.ndarray:
        """One a token; zeros where nothing is drawn."""
        if self._temperature == 0:
            return np.zeros(self._most, np.float32)
        key = hashlib.sha256(np.asarray(prompt, np.int32).tobytes()).digest()
        self._asked[key] += 1
        told = f"{self._seed}/{self._asked[key]}/".encode() + key
        drawn = np.frombuffer(hashlib.shake_128(told).digest(4 * self._most), np.uint32)
        return (drawn >> 8).astype(np.float32) / np.float32(1 << 24)


class Sampler:
    """A model's copy that samples. What it draws depends on the seed, the prompt, and how often this prompt was asked since
    `begin`: not on the batch, the timing or the number of processes, but for rounding."""

    def __init__(self, model: Any, words: Words, *, max_new_tokens: int, batch_tokens: int | None = None) -> None:
        import torch

        self.model, self.words, self.max_new_tokens = model.eval(), words, max_new_tokens
        self.temperature, self._draws = 0.0, Draws(max_new_tokens)
        self._device = next(model.parameters()).device
        self._batch_tokens = batch_tokens or self._room()
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if last_only else {}
        self._ending = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=self._device)
        self._ending[[end for end in words.ends if end < model.config.vocab_size]] = True
        self._long_stops = self._mark_stops()

    encode = property(lambda self: self.words.encode)
    chat = property(lambda self: self.words.chat)

    def begin(self, seed: int, temperature: float) -> None:
        """From now on draws follow this seed; temperature 0 is greedy."""
        self.temperature = temperature
        self._draws.begin(seed, temperature)

    def share(self, draws: Draws, temperature: float) -> None:
        """Goes on with another sampler's draws."""
        self._draws, self.temperature = draws, temperature

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any = None, seed: int = 0) -> list[Answer]:
        """One answer a prompt, in order. `sampling` and `seed` are not used: see `begin`."""
        del sampling, seed
        draws = [self._draws.of(prompt) for prompt in prompts]
        answers: dict[int, Answer] = {}
        for batch in self._batches(prompts):
            rows = self._sample([list(prompts[n]) for n in batch], np.stack([draws[n] for n in batch]))
            for number, (ids, logps) in zip(batch, rows, strict=True):
                text, ended = self.words.text(ids)
                answers[number] = Answer(said(text, prompts[number], ids, logps), len(ids), not ended)
        return [answers[number] for number in range(len(prompts))]

    def _room(self) -> int:
        """Tokens in one batch whose keys and values fit beside what is there."""
        import torch

        if self._device.type != "cuda":
            return BATCH_TOKENS_CPU
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        bytes_a_token = 2 * 2 * config.num_hidden_layers * heads * width
        total = torch.cuda.get_device_properties(self._device).total_memory
        return int(CACHE_SHARE * total / bytes_a_token)

    def _mark_stops(self) -> bool:
        """Marks every token that completes a stop string by itself; whether one can also come about by several tokens."""
        if not self.words.stop:
            return False
        hits = [token for token in self.words.stopping() if token < self._ending.shape[0]]
        if hits:
            self._ending[hits] = True
        return self.words.long_stops

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for number in sorted(range(len(prompts)), key=lambda n: len(prompts[n])):
            if batch and (len(batch) + 1) * (len(prompts[number]) + self.max_new_tokens) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _sample(self, prompts: list[list[int]], draws: np.ndarray) -> list[tuple[list[int], list[float]]]:
        import torch
        from transformers import DynamicCache

        width, device = max(map(len, prompts)), self._device
        ids = torch.full((len(prompts), width), self.words.pad, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ids, mask, uniform = ids.to(device), mask.to(device), torch.from_numpy(draws).to(device)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        rows = torch.arange(len(prompts), device=device)
        over = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        kept_ids = torch.zeros(draws.shape, dtype=torch.long, device=device)
        kept_logps = torch.zeros(draws.shape, device=device)
        lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            for step in range(self.max_new_tokens):
                out = self.model(
                    input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True, **self._last_only
                )  # fmt: skip
                token, logp = self._choose(out.logits[:, -1].float(), uniform[rows, step])
                kept_ids[rows, step], kept_logps[rows, step] = token, logp
                lengths[rows] = torch.where(over, lengths[rows], step + 1)
                over = over | self._ending[token]
                if self._long_stops:
                    over = over | self._stopped(kept_ids[rows, : step + 1])
                running = int((~over).sum())
                if running == 0:
                    break
                if 2 * running <= len(over):  # the finished ones are no longer carried along
                    left = (~over).nonzero().squeeze(1)
                    cache.batch_select_indices(left)
                    rows, over, token, mask, places = rows[left], over[left], token[left], mask[left], places[left]
                ids = token[:, None]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                places = places[:, -1:] + 1
        lasts, tokens, logps = lengths.tolist(), kept_ids.tolist(), kept_logps.tolist()
        return [(tokens[n][:last], logps[n][:last]) for n, last in enumerate(lasts)]

    def _choose(self, logits: Any, uniform: Any) -> tuple[Any, Any]:
        """Token and its log-probability: the most likely one, or the one at which the cumulated probability passes the draw."""
        import torch

        logps = torch.log_softmax(logits / (self.temperature or 1.0), -1)
        if self.temperature == 0:
            token = logps.argmax(-1)
        else:
            cumulated = logps.exp().cumsum(-1)
            wanted = (uniform * cumulated[:, -1])[:, None]
            token = torch.searchsorted(cumulated, wanted, right=True).squeeze(1).clamp(max=logps.shape[-1] - 1)
        return token, logps.gather(1, token[:, None]).squeeze(1)

    def _stopped(self, ids: Any) -> Any:
        import torch

        tails = self.words.tokenizer.batch_decode(ids[:, -TAIL_TOKENS:].tolist())
        return torch.tensor([any(stop in tail for stop in self.words.stop) for tail in tails], device=ids.device)

"""Batched sampling from a causal model, with the tokens and log-probabilities that RL needs.

`Sampler` uses transformers, on a CPU or a GPU; `VllmSampler` uses vLLM where it is installed. Both answer as `run_episodes`
of autorl_rollouts asks (`encode`, `chat`, `generate`). Copied into `code/` of a workspace and used from there; nothing here is
part of the suite itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BATCH_TOKENS_CPU = 16_384
CACHE_SHARE = 0.2
"""Of a GPU's memory: for the keys and values of one batch."""
VLLM_MEMORY_SHARE = 0.35
VLLM_SWITCH = "EXPERT_VLLM"
"""Variable: 0 keeps vLLM out, whatever is installed."""
TAIL_TOKENS = 16
"""A stop string of several tokens is looked for in so many of the last ones."""


class Answer(NamedTuple):
    """One completion, as autorl_rollouts.engine has it; `text` is a `Said`."""

    text: str
    tokens: int
    truncated: bool


class Said(str):
    """A completion's text up to the stop string, with what was really sampled.

    Attributes:
        prompt: token ids that were asked, int32.
        ids: token ids that were sampled, with the end or stop token, int32.
        logps: log-probabilities of these at the sampling temperature, float32; of greedy answers those at temperature 1.
    """

    prompt: np.ndarray
    ids: np.ndarray
    logps: np.ndarray


def said(text: str, prompt: Sequence[int], ids: Sequence[int], logps: Sequence[float]) -> Said:
    """A `Said` of these."""
    made = Said(text)
    made.prompt, made.ids = np.asarray(prompt, np.int32), np.asarray(ids, np.int32)
    made.logps = np.asarray(logps, np.float32)
    return made


class Words:
    """Texts to token ids, as graders make them; where an answer ends."""

    def __init__(self, tokenizer: Any, model_ends: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.ends = sorted({*model_ends, tokenizer.eos_token_id})
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.ends[0]
        self._encode = _encode_of(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens added."""
        return self._encode(text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of a conversation with the answer's beginning, None without a template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        return self.encode(
            self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        )

    def ending(self, *, chat: bool) -> list[int]:
        """The tokens that an answer ends with: the stop string, or the end token after a template or without a stop string."""
        return [self.tokenizer.eos_token_id] if chat or not self.stop else self.encode(self.stop[0])

    def text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text of sampled tokens up to the first end token or stop string, and whether there was one."""
        end = next((place for place, token in enumerate(ids) if token in self.ends), None)
        text = self.tokenizer.decode(list(ids if end is None else ids[:end]), skip_special_tokens=True)
        cuts = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return (text[: min(cuts)] if cuts else text), end is not None or bool(cuts)


def _encode_of(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokenizer's; by pieces, which is much faster where texts grow, where the task comes with the scheduler of episodes."""
    try:
        from autorl_rollouts.tokens import Encoder
    except ImportError:
        return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)
    encode: Callable[[str], list[int]] = Encoder(tokenizer).encode
    return encode


def ends_of(model: Any) -> list[int]:
    """The end tokens that a model's configurations name."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


class Sampler:
    """A model's copy that samples. What it draws depends on the seed, the prompt, and how often this prompt was asked since
    `begin`: not on the batch, the timing or the number of processes, but for rounding."""

    def __init__(self, model: Any, words: Words, *, max_new_tokens: int, batch_tokens: int | None = None) -> None:
        import torch

        self.model, self.words, self.max_new_tokens = model.eval(), words, max_new_tokens
        self.temperature, self._seed, self._asked = 0.0, 0, Counter[bytes]()
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
        self._seed, self.temperature = seed, temperature
        self._asked.clear()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any = None, seed: int = 0) -> list[Answer]:
        """One answer a prompt, in order. `sampling` and `seed` are not used: see `begin`."""
        del sampling, seed
        draws = [self._draws(prompt) for prompt in prompts]
        answers: dict[int, Answer] = {}
        for batch in self._batches(prompts):
            rows = self._sample([list(prompts[n]) for n in batch], np.stack([draws[n] for n in batch]))
            for number, (ids, logps) in zip(batch, rows, strict=True):
                text, ended = self.words.text(ids)
                answers[number] = Answer(said(text, prompts[number], ids, logps), len(ids), not ended)
        return [answers[number] for number in range(len(prompts))]

    def _draws(self, prompt: Sequence[int]) -> np.ndarray:
        """Uniform numbers, one a token."""
        if self.temperature == 0:
            return np.zeros(self.max_new_tokens, np.float32)
        key = hashlib.sha256(np.asarray(prompt, np.int32).tobytes()).digest()
        self._asked[key] += 1
        told = f"{self._seed}/{self._asked[key]}/".encode() + key
        stream = int.from_bytes(hashlib.sha256(told).digest()[:16], "little")
        return np.random.Generator(np.random.Philox(key=stream)).random(self.max_new_tokens, np.float32)

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
        vocabulary = min(len(self.words.tokenizer), self._ending.shape[0])
        texts = self.words.tokenizer.batch_decode([[token] for token in range(vocabulary)])
        hits = [token for token, text in enumerate(texts) if any(stop in text for stop in self.words.stop)]
        if hits:
            self._ending[hits] = True
        return any(len(stop) > 1 for stop in self.words.stop)

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


def vllm_is_there(processes: int) -> bool:
    """Whether rollouts go through vLLM: installed, not switched off, a GPU, one process."""
    import torch

    wanted = os.environ.get(VLLM_SWITCH, "1") != "0"
    return wanted and processes == 1 and torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


class VllmSampler:
    """The same by vLLM, in this process, on a part of the GPU's memory. Weights come from a folder, and are exchanged in it."""

    def __init__(self, folder: Path, words: Words, *, max_new_tokens: int, max_tokens: int, seed: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

        self.words, self.max_new_tokens, self.temperature = words, max_new_tokens, 0.0
        self._llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            seed=seed,
            max_model_len=max_tokens,
            gpu_memory_utilization=VLLM_MEMORY_SHARE,
            enable_prefix_caching=True,
            disable_log_stats=True,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
        )

    encode = property(lambda self: self.words.encode)
    chat = property(lambda self: self.words.chat)

    def begin(self, seed: int, temperature: float) -> None:
        """As `Sampler.begin`; draws come from the engine's own stream, which began with its seed."""
        del seed
        self.temperature = temperature

    def update(self, folder: Path) -> None:
        """Takes other weights of the same model from a folder of safetensors."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any = None, seed: int = 0) -> list[Answer]:
        """One answer a prompt, in order."""
        del sampling, seed
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            stop=list(self.words.stop) or None,
            include_stop_str_in_output=True,
            stop_token_ids=self.words.ends,
            logprobs=0,  # the sampled token's own
        )
        outputs = self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)
        answers = []
        for prompt, output in zip(prompts, outputs, strict=True):
            made = output.outputs[0]
            ids = list(made.token_ids)
            logps = [entry[token].logprob for token, entry in zip(ids, made.logprobs, strict=True)]
            text, ended = self.words.text(ids)
            answers.append(Answer(said(text, prompt, ids, logps), len(ids), not ended))
        return answers

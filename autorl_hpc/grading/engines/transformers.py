"""Engine `transformers`: generation on CPU or one GPU in static batches sorted by length; and the tokenizer of all engines.

Config, tokenizer and template are the base model's; only weights are swapped, tensor by tensor, in the loaded model.
"""

from __future__ import annotations

import datetime
import inspect
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.files.checkpoint import HEAD_NAME, own_tensors
from autorl_hpc.files.progress import bar
from autorl_hpc.grading.engines.weights_cache import WeightsCache, default_bytes
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import USUAL_DATE, Sampling
from autorl_hpc.rollouts.engine import Answer, EngineFailed, Loaded, LogLikelihood, Pair, fitted
from autorl_hpc.rollouts.episodes import Encoder, beginning

SCORED_TOKENS = 8192
"""Tokens of a batch whose continuations are scored: at most so many rows of logits in float32, one a token, are held at a time."""


def cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    named = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def dated(template: str, date: datetime.date) -> str:
    """Return a chat template for which today is `date`, at midnight. transformers gives templates a function for the date and
    passes no other one on, so a macro of that name takes its place."""
    if "strftime_now" not in template:
        return template
    now = datetime.datetime.combine(date, datetime.time())
    codes = {f"%{flag}{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwWxXyYZz" for flag in ("-", "")}
    steps = "".join(f"|replace({code!r}, {now.strftime(code)!r})" for code in sorted(codes))
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{steps} }}}}{{%- endmacro %}}\n{template}"


class BaseTokenizer:
    """The base model's tokenizer, its config as transformers reads it, and the end tokens (`ends`) of config, tokenizer,
    generation config and template, sorted."""

    def __init__(self, base: Path, date: datetime.date = USUAL_DATE) -> None:
        """Load it. Raises EngineFailed: the base model defines no end token. `date`: what a template takes for today, so that
        it asks the same on every day."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoConfig, AutoTokenizer

        self.config: Any = AutoConfig.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self._encoder = Encoder(self.tokenizer)
        self._beginning = beginning(self.tokenizer)
        named = bool(getattr(self.tokenizer, "chat_template", None))
        self._template = dated(self.tokenizer.get_chat_template(), date) if named else None
        self._channel: list[int] = []
        self.ends = self._end_tokens(base)
        self._end_set = frozenset(self.ends)

    def encode(self, text: str) -> list[int]:
        tokens, first = self._encoder.encode(text), self._beginning
        return tokens if tokens[: len(first)] == first else [*first, *tokens]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return None if self._template is None else self._encoder.encode(self._rendered(messages))

    def _rendered(self, messages: Sequence[dict[str, str]], prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self._template, add_generation_prompt=prompt, tokenize=False
        )
        return text

    def _turn_ends(self) -> set[int]:
        """Return the tokens by which the template ends turns, in conversations with and without a system turn, that end with the
        assistant's turn and that go on: the first added token after the assistant's text, and one directly after another's."""
        if self._template is None:
            return set()
        added = {token: text for text, token in self.tokenizer.get_added_vocab().items() if text.strip()}
        whole = [{"role": role, "content": f"0x{role[:2]}"} for role in ("system", "user", "assistant")]
        more = {"role": "user", "content": "0xmore"}
        ends: set[int] = set()
        for turns in (whole[1:], whole, [*whole[1:], more], [*whole, more]):
            try:
                rest = self._rendered(turns, prompt=False)
            except Exception:  # a template may refuse anything; then config and tokenizer name the ends
                continue
            for turn in turns:
                before, found, after = rest.partition(turn["content"])
                rest = after if found else before
                tokens = self._encoder.encode(after.partition("0x")[0].lstrip())
                tokens = tokens if turn["role"] == "assistant" else tokens[:1]
                ends.update([token for token in tokens if token in added][:1])
        return ends - self._inner_ends(ends)

    def _inner_ends(self, ends: set[int]) -> set[int]:
        """Return the tokens that end a channel inside a turn (gpt-oss's `<|end|>` behind the analysis), and note with which tokens the
        answer's own channel begins: the template shows both between an assistant's thinking and its text."""
        user, thought, text = {"role": "user", "content": "0xus"}, "0xth", "0xas"
        for field in ("thinking", "reasoning_content"):
            try:
                turn = self._rendered([user, {"role": "assistant", "content": text, field: thought}], prompt=False)
                asked, asking = self._rendered([user], prompt=False), self._rendered([user])
            except Exception:  # as above
                continue
            between, found, _ = turn.partition(thought)[2].partition(text)
            if found and not ends.isdisjoint(inner := self._encoder.encode(between)):
                self._channel = self._encoder.encode(between.rpartition(asking.removeprefix(asked))[2])
                return set(inner)
        return set()

    def _answering(self, tokens: list[int]) -> list[int]:
        """Return the text of the answer's channel: none if the model wrote to other channels alone, all if it wrote to no channel."""
        size = len(self._channel)
        begun = [i + size for i in range(len(tokens) - size + 1) if tokens[i : i + size] == self._channel]
        if not size or self._channel[0] not in tokens:
            return tokens
        return tokens[begun[-1] :] if begun else []

    def answer(self, tokens: Sequence[int], sampling: Sampling) -> Answer:
        """Return the answer in the tokens after a prompt, cut at the first end token and then at the first stop string."""
        end = next((i for i, token in enumerate(tokens) if token in self._end_set), None)
        kept = list(tokens if end is None else tokens[:end])
        text = self.tokenizer.decode(self._answering(kept), skip_special_tokens=True)
        stopped = [position for stop in sampling.stop if (position := text.find(stop)) >= 0]
        text = text[: min(stopped)] if stopped else text
        return Answer(text=text, tokens=len(kept), truncated=end is None and not stopped)

    def _end_tokens(self, base: Path) -> list[int]:
        from transformers import GenerationConfig

        ends = self._turn_ends()
        sources: list[Any] = [getattr(self.config, "eos_token_id", None), self.tokenizer.eos_token_id]
        if (base / "generation_config.json").is_file():
            sources.append(GenerationConfig.from_pretrained(base).eos_token_id)
        for value in sources:
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        if not ends:
            raise EngineFailed(f"the base model in {base} names no end token")
        return sorted(ends)


class TransformersEngine:
    """Implements the Protocol. `threads` applies to the CPU only; 0 keeps torch's default."""

    def __init__(self, base: Path, spec: GraderSpec, dtype: str, *, date: datetime.date = USUAL_DATE) -> None:
        words = BaseTokenizer(base, date)
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        device = ("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device
        if spec.threads and device == "cpu":
            torch.set_num_threads(spec.threads)
        self._torch = torch
        self._device = device
        self._batch_tokens = spec.batch_tokens
        self._words = words
        self.encode, self.chat = words.encode, words.chat
        self._model: Any = AutoModelForCausalLM.from_config(
            words.config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        self._model.to(device).eval()
        self.context_tokens = int(getattr(words.config.get_text_config(), "max_position_embeddings", None) or 2**31)
        self._targets: dict[str, Any] = dict(self._model.state_dict(keep_vars=True).items())
        _, self._left_out = own_tensors(base)
        self._tied = self._tied_names()
        if HEAD_NAME in self._targets and (HEAD_NAME in self._tied) != bool(self._left_out):
            said = "ties" if HEAD_NAME in self._tied else "does not tie"
            raise EngineFailed(
                f"transformers {said} {HEAD_NAME} to the embedding of {base.name}, and the suite understands its config and files "
                "otherwise: write `tie_word_embeddings` into config.json and stage it again"
            )
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        # Finished rows are filled with it. Answers are cut at the first end token, so padding is not counted.
        self._pad = words.ends[0]
        self._model.generation_config = GenerationConfig(eos_token_id=words.ends, pad_token_id=self._pad)
        self._cache = WeightsCache(
            default_bytes() if spec.cache_gib is None else int(spec.cache_gib * 2**30), self._left_out
        )
        name = torch.cuda.get_device_name(0) if device == "cuda" else cpu_name()
        self.identity = EngineIdentity(
            backend="transformers",
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            device=f"{device}: {name}",
            dtype=dtype,
        )

    def prefetch(self, weights: Path, content_hash: str) -> None:
        self._cache.prefetch(weights, content_hash)

    def load(self, weights: Path, content_hash: str) -> Loaded:
        torch = self._torch
        started = time.monotonic()
        checkpoint = self._cache.take(weights, content_hash)
        assert checkpoint is not None  # None is only returned after a timeout
        loaded = time.monotonic()
        tensors = {tensor.name: tensor.as_torch() for tensor in checkpoint.tensors if tensor.name not in self._left_out}
        missing = {n for n in self._targets if n not in tensors} - self._tied
        unknown = set(tensors) - set(self._targets)
        if missing or unknown:
            raise EngineFailed(
                f"tensor names differ from the model's: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
            )
        with torch.no_grad():
            for key, value in tensors.items():
                self._targets[key].copy_(value)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return Loaded(load_s=loaded - started, swap_s=time.monotonic() - loaded)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        torch = self._torch
        torch.manual_seed(seed)
        answers: list[Answer | None] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        with bar("answering items", len(prompts), in_bytes=False) as advance:
            for batch in self._batches(order, prompts, sampling.max_new_tokens, self._batch_tokens):
                made = self._generate_batch([prompts[i] for i in batch], sampling)
                for index, answer in zip(batch, made, strict=True):
                    answers[index] = answer
                advance(len(batch))
        return [answer for answer in answers if answer is not None]

    def loglikelihood(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        pairs = fitted(pairs, self.context_tokens)
        rows = [[*context, *continuation] for context, continuation in pairs]
        found: dict[int, LogLikelihood] = {}
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for batch in self._batches(order, rows, 0, min(SCORED_TOKENS, self._batch_tokens)):
            scored = self._score_batch([rows[i] for i in batch], [len(pairs[i][0]) for i in batch])
            found.update(zip(batch, scored, strict=True))
        return [found[i] for i in range(len(rows))]

    def close(self) -> None:
        self._cache.close()
        self._targets = {}
        self._model = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def _score_batch(self, rows: list[list[int]], begins: list[int]) -> list[LogLikelihood]:
        """Return the log-likelihood of each row from its token `begin` on. A causal model's logits of a token don't depend on the
        padding after it, and its position needs no telling."""
        torch, first = self._torch, min(begins) - 1
        ids, mask = self._padded(rows, left=False)
        kept = {"logits_to_keep": ids.shape[1] - first} if self._keeps_logits else {}
        scored = []
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False, **kept).logits
            logits = logits if kept else logits[:, first:]
            for row, tokens, begin in zip(logits, rows, begins, strict=True):
                chances = row[begin - 1 - first : len(tokens) - 1 - first].float().log_softmax(-1)
                wanted = torch.tensor(tokens[begin:], device=chances.device)[:, None]
                own = chances.gather(1, wanted)
                scored.append(LogLikelihood(own.sum().item(), bool((own[:, 0] == chances.amax(-1)).all())))
        return scored

    def _padded(self, rows: Sequence[Sequence[int]], left: bool) -> tuple[Any, Any]:
        """Return token ids and attention mask of a batch on the device, padded to one length at the left or the right."""
        torch, width = self._torch, max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for number, row in enumerate(rows):
            span = slice(width - len(row), width) if left else slice(len(row))
            ids[number, span] = torch.tensor(list(row), dtype=torch.long)
            mask[number, span] = 1
        return ids.to(self._device), mask.to(self._device)

    @staticmethod
    def _batches(
        order: list[int], prompts: Sequence[Sequence[int]], new_tokens: int, limit: int
    ) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:  # lengths rise, so the newest decides the padded size
            if batch and (len(batch) + 1) * (len(prompts[index]) + new_tokens) > limit:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _generate_batch(self, prompts: list[Sequence[int]], sampling: Sampling) -> list[Answer]:
        ids, mask = self._padded(prompts, left=True)
        options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options.update(temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
        if sampling.stop:
            options.update(stop_strings=list(sampling.stop), tokenizer=self._words.tokenizer)
        with self._torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, **options)
        return [self._words.answer(row.tolist(), sampling) for row in out[:, ids.shape[1] :].cpu()]

    def _tied_names(self) -> set[str]:
        """Return names of tensors that share another tensor's storage (a tied head) or that no file holds (buffers)."""
        seen: dict[int, str] = {}
        tied: set[str] = set()
        for name, value in self._targets.items():
            if value.data_ptr() in seen and value.numel():
                tied.add(name)
            seen.setdefault(value.data_ptr(), name)
        return tied

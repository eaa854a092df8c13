"""Engine on transformers' generate: CPU or one GPU, sorted static batches.

Config, tokenizer and template are the base model's; only weights are swapped, tensor by tensor into the living model.
Files are read by large sequential reads, never mapped, and hashed on the way: what was accepted is what is scored.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.files.checkpoint import content_hash as hash_of_parts
from autorl_hpc.files.checkpoint import read_header, weight_files
from autorl_hpc.files.faults import again
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer, EngineFailed, Loaded, WeightsChanged
from autorl_hpc.rollouts.tokens import Encoder

Part = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and sha256 of one tensor."""

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class TransformersEngine:
    """See the Protocol. `threads` applies to the CPU alone; 0 leaves torch's default."""

    def __init__(self, base: Path, *, dtype: str, device: str, threads: int, batch_tokens: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if threads and device == "cpu":
            torch.set_num_threads(threads)
        self._torch = torch
        self._device = device
        self._batch_tokens = batch_tokens
        config = AutoConfig.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self._encoder = Encoder(self._tokenizer)
        self._model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        self._model.to(device).eval()
        self._targets: dict[str, Any] = dict(self._model.state_dict(keep_vars=True).items())
        self._tied = self._tied_names()
        self._eos = self._end_tokens(base)
        self._pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self._eos[0]
        self._model.generation_config = GenerationConfig(eos_token_id=self._eos, pad_token_id=self._pad)
        name = torch.cuda.get_device_name(0) if device == "cuda" else _cpu_name()
        self._identity = EngineIdentity(
            backend="transformers",
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            device=f"{device}: {name}",
            dtype=dtype,
        )

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self.encode(text)

    def load(self, weights: Path, content_hash: str) -> Loaded:
        torch = self._torch
        started = time.monotonic()
        parts: list[Part] = []
        tensors: dict[str, Any] = {}
        for name in weight_files(weights):
            for spec, data in again(functools.partial(_read_tensors, weights / name)):
                digest = hashlib.sha256(data).hexdigest()
                parts.append((spec.name, spec.dtype, spec.shape, digest))
                flat = torch.frombuffer(data, dtype=getattr(torch, TORCH_NAMES[spec.dtype]))
                tensors[spec.name] = flat.reshape(spec.shape)
        if hash_of_parts(self._without_tied_copies(parts)) != content_hash:
            raise WeightsChanged(f"{weights} no longer has the content {content_hash}")
        loaded = time.monotonic()
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
        for batch in self._batches(order, prompts, sampling.max_new_tokens):
            for index, answer in zip(batch, self._generate_batch([prompts[i] for i in batch], sampling), strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        self._targets = {}
        self._model = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def _batches(self, order: list[int], prompts: Sequence[Sequence[int]], new_tokens: int) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:  # lengths rise, so the newest decides the padded size
            if batch and (len(batch) + 1) * (len(prompts[index]) + new_tokens) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _generate_batch(self, prompts: list[Sequence[int]], sampling: Sampling) -> list[Answer]:
        torch = self._torch
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.long)
            mask[row, width - len(prompt) :] = 1
        options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options.update(temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
        if sampling.stop:
            options.update(stop_strings=list(sampling.stop), tokenizer=self._tokenizer)
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **options)
        return [self._answer(row.tolist(), sampling) for row in out[:, width:].cpu()]

    def _answer(self, tokens: list[int], sampling: Sampling) -> Answer:
        end = next((i for i, token in enumerate(tokens) if token in self._eos), None)
        kept = tokens if end is None else tokens[:end]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        stopped = [position for stop in sampling.stop if (position := text.find(stop)) >= 0]
        text = text[: min(stopped)] if stopped else text
        return Answer(text=text, tokens=len(kept), truncated=end is None and not stopped)

    def _without_tied_copies(self, parts: list[Part]) -> list[Part]:
        """Intake leaves a tied head that equals its embedding out of the content hash; so does this."""
        others = {digest for name, _, _, digest in parts if name not in self._tied}
        return [part for part in parts if part[0] not in self._tied or part[3] not in others]

    def _tied_names(self) -> set[str]:
        """Names whose storage another name already fills: a tied head; and buffers that no file holds."""
        seen: dict[int, str] = {}
        tied: set[str] = set()
        for name, value in self._targets.items():
            if value.data_ptr() in seen and value.numel():
                tied.add(name)
            seen.setdefault(value.data_ptr(), name)
        return tied

    def _end_tokens(self, base: Path) -> list[int]:
        from transformers import GenerationConfig

        ends: set[int] = set()
        sources: list[Any] = [self._model.config.eos_token_id, self._tokenizer.eos_token_id]
        if (base / "generation_config.json").is_file():
            sources.append(GenerationConfig.from_pretrained(base).eos_token_id)
        for value in sources:
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        if not ends:
            raise EngineFailed(f"the base model in {base} names no end token")
        return sorted(ends)


def _read_tensors(path: Path) -> list[tuple[Any, bytearray]]:
    """Every tensor of a file with its bytes, in file order, by sequential reads."""
    tensors = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for spec in sorted(read_header(fd, path.name), key=lambda t: t.begin):
            data = bytearray(spec.end - spec.begin)
            view = memoryview(data)
            position = spec.begin
            while view:
                got = os.preadv(fd, [view], position)
                if got <= 0:
                    raise WeightsChanged(f"{path} is shorter than its header says")
                view = view[got:]
                position += got
            tensors.append((spec, data))
    finally:
        os.close(fd)
    return tensors

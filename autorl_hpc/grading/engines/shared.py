"""Parts shared by all engines: tokenizer, chat template, end tokens, cutting of answers, check of config files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer, EngineFailed
from autorl_hpc.rollouts.episodes import Encoder


class Words:
    """The base model's tokenizer.

    Attributes:
        config: the base model's config as transformers reads it.
        ends: end tokens of the config, the tokenizer and the generation config, sorted.
    """

    def __init__(self, base: Path) -> None:
        """
        Raises:
            EngineFailed: the base model defines no end token.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoConfig, AutoTokenizer

        self.config: Any = AutoConfig.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        self._encoder = Encoder(self._tokenizer)
        self.ends = self._end_tokens(base)
        self._end_set = frozenset(self.ends)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer object itself."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """See the Protocol."""
        return self._encoder.encode(text)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """See the Protocol."""
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self.encode(text)

    def answer(self, tokens: Sequence[int], sampling: Sampling) -> Answer:
        """Return the answer, cut at the first end token and then at the first stop string.

        Args:
            tokens: generated tokens without the prompt; tokens after an end token are padding.
        """
        end = next((i for i, token in enumerate(tokens) if token in self._end_set), None)
        kept = list(tokens if end is None else tokens[:end])
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        stopped = [position for stop in sampling.stop if (position := text.find(stop)) >= 0]
        text = text[: min(stopped)] if stopped else text
        return Answer(text=text, tokens=len(kept), truncated=end is None and not stopped)

    def _end_tokens(self, base: Path) -> list[int]:
        from transformers import GenerationConfig

        ends: set[int] = set()
        sources: list[Any] = [getattr(self.config, "eos_token_id", None), self._tokenizer.eos_token_id]
        if (base / "generation_config.json").is_file():
            sources.append(GenerationConfig.from_pretrained(base).eos_token_id)
        for value in sources:
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        if not ends:
            raise EngineFailed(f"the base model in {base} names no end token")
        return sorted(ends)


# --- config files of the base model

NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files that decide how an engine computes. Artifacts hold none of them."""


class ComputedBy:
    """Digests of one base model's config files."""

    def __init__(self, base: Path) -> None:
        self._digests = {name: _digest(base / name) for name in NAMES}

    def refuse_others(self, weights: Path) -> None:
        """Refuse a folder of weights with config files that differ from the base model's. Artifacts should hold weights only.

        Raises:
            EngineFailed: a file differs.
        """
        for name, wanted in self._digests.items():
            found = _digest(weights / name)
            if found is not None and found != wanted:
                raise EngineFailed(
                    f"{weights} has a {name} that is not the base model's: its weights are not put into this engine"
                )


def _digest(path: Path) -> str | None:
    """Return the sha256 of a small file (of a JSON file: of its parsed content); None if the file is missing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        data = json.dumps(json.loads(data), sort_keys=True).encode()
    except ValueError:
        pass
    return hashlib.sha256(data).hexdigest()

"""Texts to token ids and back, as graders make them, and what a sampler answers.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself. Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

KEPT_TEXTS = 20_000


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
        self.long_stops = any(len(each) > 1 for each in self.stop)
        """Whether a stop string can come about by several tokens."""
        self._encoder = _by_pieces(tokenizer)
        self._texts: dict[tuple[int, ...], tuple[str, bool]] = {}
        whole, plain = list(tokenizer("a").input_ids), self.plain("a")
        self._beginning = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, begun as the tokenizer begins a text."""
        tokens = self.plain(text)
        return tokens if tokens[: len(self._beginning)] == self._beginning else [*self._beginning, *tokens]

    def plain(self, text: str) -> list[int]:
        """Token ids of a text that goes on, such as an answer: without special tokens."""
        if self._encoder is not None:
            return list(self._encoder.encode(text))
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def stopping(self) -> list[int]:
        """Every token that completes a stop string by itself."""
        if not self.stop:
            return []
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return [token for token, text in enumerate(texts) if any(stop in text for stop in self.stop)]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of a conversation with the answer's beginning, None without a template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        return self.plain(
            self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        )

    def ending(self, *, chat: bool) -> list[int]:
        """The tokens that an answer ends with: the stop string, or the end token after a template or without a stop string."""
        return [self.tokenizer.eos_token_id] if chat or not self.stop else self.plain(self.stop[0])

    def text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text of sampled tokens up to the first end token or stop string, and whether there was one. Short answers come again."""
        key = tuple(ids)
        if key not in self._texts:
            if len(self._texts) >= KEPT_TEXTS:
                self._texts.clear()
            self._texts[key] = self._text(key)
        return self._texts[key]

    def _text(self, ids: Sequence[int]) -> tuple[str, bool]:
        end = next((place for place, token in enumerate(ids) if token in self.ends), None)
        text = self.tokenizer.decode(list(ids if end is None else ids[:end]), skip_special_tokens=True)
        cuts = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return (text[: min(cuts)] if cuts else text), end is not None or bool(cuts)


def _by_pieces(tokenizer: Any) -> Any | None:
    """The graders' own encoder, which keeps the pieces of prompts that grow; None where no episodes are played, and no prompt grows."""
    try:
        from autorl_rollouts.episodes import Encoder
    except ImportError:
        return None
    return Encoder(tokenizer)


def ends_of(model: Any) -> list[int]:
    """The end tokens that a model's configurations name."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)

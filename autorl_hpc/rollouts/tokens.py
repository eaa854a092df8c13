"""Token ids of texts that grow, without cutting all of them into tokens again at each turn.

A text is cut before each line feed that follows on an ASCII letter or digit, the pieces are encoded alone, and their ids are
kept. That equals encoding the whole text wherever a tokenizer splits there before it forms tokens. Whether it does is read from
its definition: normal forms or nothing before, the splitting rules of the families below, byte-level BPE without dropout, and
no added token over such a place. None of these rules puts a letter or digit and a line feed into one part, and none looks
past that place. With any other tokenizer (SentencePiece's, say) whole texts are encoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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

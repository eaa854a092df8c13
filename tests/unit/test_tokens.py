"""Encoding by pieces: always the ids of the whole text, with the tokenizers of several families."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.rollouts.episodes import SPLITS, Encoder, pieces

TINY = Path(__file__).resolve().parents[2] / "templates" / "models" / "tiny" / "tokenizer.json"

ALPHABET = [
    "a", "B", "1", "12345", "word", "\n", "\n\n", "\r", "\r\n", " ", "  ", "\t", "\x0b", "\u2028", "\u00a0", ".", ",", "...", "/", "_",
    "'s", "'", "\u00e9", "e\u0301", "\u0301", "\u7684", "\U0001f600", "\u017f", "\u0661", "\u2460", "<|endoftext|>", "<|end", "|>", ">", "\x00",
]  # fmt: skip

GAME = "You are in the middle of a room.\nYour task is to: put some spraybottle on toilet.\n>"
TURNS = "".join(
    f" go to cabinet {number}\nOn the cabinet {number}, you see a cloth 1, a soapbar {number % 5}.\n>"
    for number in range(60)
)


def made(pre: Any, *, normalizer: Any = None, added: list[dict[str, Any]] | None = None, **model: Any) -> Any:
    """A byte-level BPE tokenizer with these rules, learned from a little text."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator([*(["a\nb 1\n2\n\nword\n word"] * 40), GAME, TURNS, "\n\n", "e\u0301\n"], trainer)
    text = json.loads(raw.to_str())
    text["pre_tokenizer"], text["normalizer"] = pre, normalizer
    text["model"].update(model)
    for number, token in enumerate(added or []):
        base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        text["added_tokens"].append({**base, "id": len(text["model"]["vocab"]) + number, **token})
    backend = tokenizers.Tokenizer.from_str(json.dumps(text))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NO_REGEX = {**BYTES, "use_regex": False}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def chain(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(rules)}


LONG = sorted(regex for regex in SPLITS if r"\s+(?!\S)" in regex)
ENDS = [{"content": "<|endoftext|>"}]
SAFE: dict[str, Any] = {
    "GPT-2": (BYTES, {}),
    "SmolLM2": (chain({"type": "Digits", "individual_digits": True}, BYTES), {"added": ENDS}),
    "normal forms": (BYTES, {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "NFC"}]}}),
    "tokens that eat what follows": (BYTES, {"added": [{"content": "<|endoftext|>", "rstrip": True, "lstrip": True}]}),
    **{
        f"rule {n}": (chain(split(r"\p{N}{1,3}"), split(regex), NO_REGEX), {"added": ENDS})
        for n, regex in enumerate(LONG)
    },
    "DeepSeek": (chain(*(split(regex) for regex in SPLITS if "p{L}+|" not in regex), NO_REGEX), {"added": ENDS}),
    **{f"rule {n} alone": (chain(split(regex), NO_REGEX), {}) for n, regex in enumerate(LONG)},
}


def texts(seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    drawn = ["".join(draw.choice(ALPHABET) for _ in range(draw.randrange(14))) for _ in range(600)]
    return [*drawn, GAME, GAME + TURNS, *(GAME + TURNS[:end] for end in range(0, 600, 7)), ""]


def whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("name", SAFE)
def test_pieces_give_the_ids_of_the_whole_text(name: str) -> None:
    pre, options = SAFE[name]
    tokenizer = made(pre, **options)
    encoder = Encoder(tokenizer)
    assert encoder.by_pieces
    expected = tokenizer(texts(), add_special_tokens=False).input_ids
    for text, ids in [*zip(texts(), expected, strict=True)] * 2:
        assert encoder.encode(text) == ids, repr(text)


def test_the_tiny_models_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TINY))
    encoder = Encoder(tokenizer)
    assert encoder.by_pieces
    expected = tokenizer(texts(1), add_special_tokens=False).input_ids
    assert [encoder.encode(text) for text in texts(1)] == expected


def test_pieces_are_the_text() -> None:
    for text in texts(2):
        parts = pieces(text)
        assert "".join(parts) == text and all(parts[1:])
        assert all(part.startswith("\n") and before[-1].isalnum() for before, part in itertools.pairwise(parts))
    assert pieces("a\nb\n\nc.\nd\n") == ["a", "\nb", "\n\nc.\nd", "\n"]

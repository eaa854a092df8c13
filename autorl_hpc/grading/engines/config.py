"""The files of the base model that an engine computes by, and that no folder of weights may have otherwise."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autorl_hpc.rollouts.engine import EngineFailed

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
"""Artifacts hold none of them."""


class ComputedBy:
    """Of one base model, as its files are now."""

    def __init__(self, base: Path) -> None:
        self._digests = {name: _digest(base / name) for name in NAMES}

    def refuse_others(self, weights: Path) -> None:
        """Artifacts are weights alone. Were there a config beside them, it would have to be the one that the engine computes by.

        Raises:
            EngineFailed: it is another one.
        """
        for name, wanted in self._digests.items():
            found = _digest(weights / name)
            if found is not None and found != wanted:
                raise EngineFailed(
                    f"{weights} has a {name} that is not the base model's: its weights are not put into this engine"
                )


def _digest(path: Path) -> str | None:
    """sha256 of a small file; None where there is none. A JSON's is that of its content, however it is laid out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        data = json.dumps(json.loads(data), sort_keys=True).encode()
    except ValueError:
        pass
    return hashlib.sha256(data).hexdigest()

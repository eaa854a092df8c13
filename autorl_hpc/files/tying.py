"""Whether a base model's head is its embedding, decided in one place: for the content hash, intake and every engine alike.

It is where the config ties them, whatever the file holds, or where the file has no head. Then a head that lies in a file all the same
(as in some published models) counts for nothing: it must equal the embedding, no content hash covers it, and no engine uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import EMBEDDING_NAMES, HEAD_NAME, TensorSpec, content_hash, folder_parts, tensors_of

TIED_BY_DEFAULT = frozenset(
    [
        *(
            "biogpt",
            "bloom",
            "cohere",
            "cohere2",
            "cohere2_moe",
            "cpmant",
            "ctrl",
            "ernie4_5",
            "ernie4_5_moe",
            "falcon",
        ),
        *(
            "falcon_mamba",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gemma3n",
            "gemma3n_text",
            "gemma4",
            "gemma4_text",
        ),
        *(
            "gpt-sw3",
            "gpt2",
            "gpt_bigcode",
            "gpt_neo",
            "granite_swa",
            "jetmoe",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "minicpm3",
        ),
        *(
            "modernbert-decoder",
            "mpt",
            "opt",
            "recurrent_gemma",
            "smollm3",
            "starcoder2",
            "vaultgemma",
            "xglm",
            "youtu",
        ),
        *("zamba", "zamba2", "zaya"),
    ]
)
"""Values of `model_type` for which transformers (5.24) ties where the config says nothing; for all other causal models it does not."""


def config_ties(config: Mapping[str, Any]) -> bool:
    """`tie_word_embeddings` as transformers resolves it."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return config.get("model_type") in TIED_BY_DEFAULT


def own_tensors(base: Path) -> tuple[list[TensorSpec], frozenset[str]]:
    """The tensors of a staged base model that a checkpoint of it has to have, and the names that count for nothing beside them."""
    tensors = tensors_of(base)
    own = [tensor for tensor in tensors if tensor.name != HEAD_NAME]
    if len(own) < len(tensors) and not config_ties(json.loads(reading.read_bytes(base / "config.json"))):
        return tensors, frozenset()
    return own, frozenset({HEAD_NAME})


def base_content_hash(folder: Path) -> str:
    """The content hash of a base model: reads every tensor once.

    Raises:
        Refused: it is no model that can be a base; `untied_head`: the config ties head and embedding, and the file holds two that
            differ. transformers would then load both, other engines the embedding alone.
    """
    parts = folder_parts(folder)
    _, tied = own_tensors(folder)
    found = {name: tuple(rest) for name, *rest in parts}
    if HEAD_NAME in tied & found.keys():
        embedding = next((name for name in EMBEDDING_NAMES if name in found), None)
        if embedding is None or found[HEAD_NAME] != found[embedding]:
            raise Refused(
                "untied_head",
                f"config.json ties the embeddings (tie_word_embeddings), and {HEAD_NAME} is not {embedding or 'an embedding that is known'}",
                f"write `tie_word_embeddings: false` into config.json if the head counts, else save the model without {HEAD_NAME}",
            )
    return content_hash(part for part in parts if part[0] not in tied)

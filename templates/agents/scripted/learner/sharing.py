"""Attention over sequences that stand behind one copy of the beginning that they share, one after the other in one row.

All else in a decoder works token by token, so a row needs no padding to others, and the shared beginning is computed, and
learned from, once for all. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from batches import Group
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

NAME = "shared_beginning"

_now: tuple[Sequence[Group], torch.dtype] | None = None
"""The row that is being computed; a model's forward passes are one after the other."""


def can_share(model: Any) -> bool:
    """Whether a transformers model's attention can be exchanged by this one: plain, and not computed again in the backward pass."""
    config = model.config
    special = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size", "layer_types")
    plain = all(not getattr(config, name, None) for name in special[:-1])
    kinds = set(getattr(config, special[-1], None) or ["full_attention"])
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if not (getattr(model, "_supports_attention_backend", False) and plain and kinds == {"full_attention"}):
        return False
    return config._attn_implementation == "sdpa" and not checkpointed


@contextlib.contextmanager
def sharing(model: Any, groups: Sequence[Group], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The model's forward pass takes one row of these groups meanwhile, with the arguments given here; attention computes in `dtype`."""
    global _now
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    usual = model.config._attn_implementation
    model.config._attn_implementation, _now = NAME, (groups, dtype)
    try:
        # A mask of four dimensions is handed on as it is, and nothing is made of the places.
        yield {"attention_mask": torch.ones((1, 1, 1, 1), dtype=dtype, device=next(model.parameters()).device)}
    finally:
        model.config._attn_implementation, _now = usual, None


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one row: query [1, heads, t, dim], key and value [1, fewer heads, t, dim]; answers [1, t, heads, dim]."""
    assert _now is not None
    groups, dtype = _now
    times = query.shape[1] // key.shape[1]
    query, key, value = (
        query.to(dtype)[0],
        key.to(dtype)[0].repeat_interleave(times, 0),
        value.to(dtype)[0].repeat_interleave(times, 0),
    )
    scale = options.get("scaling")
    answers = []
    at = 0
    for group in groups:
        head, tail = slice(at, at + group.shared), slice(at + group.shared, at + group.tokens)
        at += group.tokens
        heads, dim = query.shape[0], query.shape[2]
        shape = (heads, group.number, group.length, dim)
        own_query, own_key, own_value = (one[:, tail].reshape(shape).transpose(0, 1) for one in (query, key, value))
        if not group.shared:
            seen = functional.scaled_dot_product_attention(own_query, own_key, own_value, is_causal=True, scale=scale)
        else:
            first, keys, values = (one[None, :, head] for one in (query, key, value))
            seen = functional.scaled_dot_product_attention(first, keys, values, is_causal=True, scale=scale)
            answers.append(seen[0])
            all_keys, all_values = (
                torch.cat([one.expand(group.number, -1, -1, -1), own], 2)
                for one, own in ((keys, own_key), (values, own_value))
            )
            looks = causal_lower_right(group.length, group.shared + group.length)
            seen = functional.scaled_dot_product_attention(
                own_query.contiguous(), all_keys, all_values, attn_mask=looks, scale=scale
            )
        answers.append(seen.transpose(0, 1).reshape(heads, -1, dim))
    return torch.cat(answers, 1).transpose(0, 1)[None].contiguous(), None

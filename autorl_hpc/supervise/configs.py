"""A submission's config.json against the base model's: a difference in what is computed is refused.

The grader computes with the base model's config whatever a submission says, so nothing can be won here; the comparison
tells an agent that it trained another model than the one that would be scored.
"""

from __future__ import annotations

from typing import Any

from autorl_hpc.errors import Refused

IGNORED_CONFIG = frozenset(
    [
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "max_length",
        "task_specific_params",
        "pretraining_tp",
        "is_llama_config",
    ]
)
"""Config fields that don't change what the base's architecture computes from given weights."""

PRESENCE_MATTERS = frozenset(
    {"quantization_config", "rope_parameters", "rope_scaling", "sliding_window", "layer_types"}
)
"""Fields whose mere presence on one side makes another model."""


def compare_config(config: dict[str, Any], base: dict[str, Any]) -> None:
    """Compares the fields that both have, and those whose mere presence matters.

    Raises:
        Refused: naming the field and both values.
    """
    mine, theirs = _normal_config(config), _normal_config(base)
    for key in sorted(set(mine) | set(theirs)):
        a, b = mine.get(key), theirs.get(key)
        both = key in mine and key in theirs
        if a != b and (both or key in PRESENCE_MATTERS):
            raise _differs(key, a, f"the base model's is {_short(b)}")


def _normal_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that matter, RoPE written one way, empty values dropped."""
    flat = {key: value for key, value in config.items() if key not in IGNORED_CONFIG and value is not None}
    _one_rope(flat)
    if not flat.get("use_sliding_window", True):
        flat.pop("sliding_window", None)
    if isinstance(flat.get("layer_types"), list) and set(map(str, flat["layer_types"])) == {"full_attention"}:
        flat.pop("layer_types")
    return flat


def _one_rope(flat: dict[str, Any]) -> None:
    """Makes `rope_theta` and `rope_scaling` of `rope_parameters`, which newer versions of transformers write.

    Raises:
        Refused: it is written more than once, and not the same.
    """
    scalings = [flat[key] for key in ("rope_parameters", "rope_scaling") if isinstance(flat.get(key), dict)]
    if any(isinstance(part, dict) for scaling in scalings for part in scaling.values()):
        return  # one set for each kind of layer: compared as it stands
    thetas = [
        value for value in (flat.get("rope_theta"), *(s.get("rope_theta") for s in scalings)) if value is not None
    ]
    for key, values in (("rope_theta", thetas), ("rope_scaling", [_plain_scaling(s) for s in scalings])):
        flat.pop(key, None)
        if any(value != values[0] for value in values):
            raise _differs(
                key, values[0], f"in another place it is {_short(next(v for v in values if v != values[0]))}"
            )
        if values and values[0] is not None:
            flat[key] = values[0]
    flat.pop("rope_parameters", None)


def _plain_scaling(scaling: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling without theta, its kind under one name; None for the kind that changes nothing."""
    plain = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    plain.setdefault("rope_type", scaling.get("type") or "default")
    return None if plain["rope_type"] == "default" else plain


def _differs(field: str, value: Any, other: str) -> Refused:
    return Refused(
        "config_differs",
        f"config.json: field {field} is {_short(value)}, {other}",
        "keep the base model's config; only weights may change",
    )


def _short(value: Any) -> str:
    return "absent" if value is None else repr(value)[:100]

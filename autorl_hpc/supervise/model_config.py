"""Compare a submitted config.json with the base model's, by what transformers makes of both. Run as a module, this file is the child that
asks transformers: a hostile value may ask for any amount of memory. Graders compute with the base model's config anyway."""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.processes import start_own

IGNORED = frozenset([
    "_name_or_path", "_attn_implementation_autoset", "architectures", "attn_implementation", "bos_token_id",
    "dtype", "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype", "transformers_version",
    "use_cache", "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states", "return_dict", "max_length",
    "task_specific_params", "pretraining_tp", "is_llama_config", "id2label", "label2id", "num_labels",
    "problem_type", "type", "is_decoder", "is_encoder_decoder",
])  # fmt: skip
"""Fields that don't change what the base architecture computes from given weights."""
# Fields that make another model even if only one of the two configs has them.
ALSO_ALONE = {"quantization_config", "rope_parameters", "rope_scaling", "sliding_window", "layer_types"}

CPU_S, MEMORY_BYTES, WALL_S = 60, 4 << 30, 600


def compare_config(config: dict[str, Any], base: dict[str, Any]) -> None:
    """Raise Refused if two configs differ in meaning: names field and values; OSError: transformers could not be asked."""
    mine, theirs = told(config), told(base)
    if mine == theirs:
        return
    meaning = _meaning(mine, theirs) or (_without_nulls(mine), _without_nulls(theirs))
    if found := first_difference(*meaning):
        field, a, b = found
        what = f"config.json: field {field} is {_short(a)}, the base model's is {_short(b)}"
        raise Refused("config_differs", what, "keep the base model's config; only weights may change")


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that count, also of nested parts. A null counts: it may stand in place of a default."""
    kept = {name: value for name, value in config.items() if name not in IGNORED}
    if isinstance(layers := kept.get("layer_types"), list) and all(layer == "full_attention" for layer in layers):
        del kept["layer_types"]
    return {name: told(value) if isinstance(value, dict) else value for name, value in kept.items()}


def first_difference(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "", alone: bool = False
) -> tuple[str, Any, Any] | None:
    """Return name and values of the first field that both have and that differs; with `alone` of any that one has."""
    for name in sorted(mine.keys() | theirs.keys()):
        a, b, every = mine.get(name), theirs.get(name), alone or name in ALSO_ALONE
        if isinstance(a, dict) and isinstance(b, dict):
            if found := first_difference(a, b, f"{path}{name}.", every):
                return found
        elif a != b and (every or (name in mine and name in theirs)):
            return path + name, a, b
    return None


def _short(value: Any) -> str:
    return "absent" if value is None else repr(value)[:100]


def _meaning(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what transformers makes of two configs; None where it isn't installed, or doesn't know the base model's. Raises Refused: it
    takes that one and not the other; OSError: it gave no answer in time."""
    ours, base = json.loads(ask_transformers(json.dumps([mine, theirs], sort_keys=True)))
    if not isinstance(base, dict):
        return None
    if not isinstance(ours, dict):
        what = f"config.json: transformers can't read it: {ours}"[:500]
        raise Refused("config_differs", what, "keep the base model's config; only weights may change")
    return told(ours), told(base)


@functools.lru_cache(maxsize=8)
def ask_transformers(configs: str) -> bytes:
    """Return what `answer` says, from a process of its own. Raises OSError: it gave no answer in time."""
    child = start_own("autorl_hpc.supervise.model_config", stderr=subprocess.DEVNULL)
    try:
        said, _ = child.communicate(configs.encode(), timeout=WALL_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"transformers did not read a config within {WALL_S} s") from None
    finally:
        child.kill()
        child.wait()
    return said or b'["it ran out of time or memory", {}]'


def answer(configs: str) -> str:
    """Return what `read` makes of each config in a JSON list, as one."""
    return json.dumps([read(config) for config in json.loads(configs)])


def read(config: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the fields that transformers makes of a config, or its complaint."""
    try:
        from transformers import CONFIG_MAPPING, PretrainedConfig

        plain = PretrainedConfig._decode_special_floats(dict(config))  # infinity is written as a table
        fields: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(plain).to_dict()
        made: dict[str, Any] = json.loads(json.dumps(fields, default=str))
        return made
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Answer the configs on standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.write(answer(sys.stdin.read()))


if __name__ == "__main__":
    main()

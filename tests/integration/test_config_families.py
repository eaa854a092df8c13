"""Checkpoints of many families, saved again by the installed transformers, are the base model's, whatever words its config.json has."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Desk, changed, save, tiny_config, tiny_tensors

from autorl_hpc.errors import Refused
from autorl_hpc.supervise.intake import lint_folder
from autorl_hpc.supervise.lint import BaseModel
from autorl_hpc.supervise.model_config import compare_config, first_difference, read, told

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": MOE,
    "qwen3_moe": MOE,
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    },
}
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2"),
    *("olmo", "olmo2", "olmo3", "phi", "phi3", "granite", "smollm3", "starcoder2", "stablelm", "glm", "glm4"),
    *("nemotron", "helium", "exaone4", "ernie4_5", "arcee", "seed_oss", "apertus", "hunyuan_v1_dense"),
    *("gpt2", "gpt_neox", "opt", "bloom"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"),
)


def as_the_hub_has_it(config: dict[str, Any]) -> dict[str, Any]:
    """The same model in the words of version 4: rope and dtype at the top, and what follows from other fields left out."""
    older = {name: value for name, value in config.items() if name not in ("layer_types", "dtype", "rope_parameters")}
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        older |= {"rope_theta": rope["full_attention"]["rope_theta"]}
        older |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    elif "rope_theta" in rope:
        older |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    return {**older, "torch_dtype": "float32", "transformers_version": "4.50.0"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_again_is_the_same_model(tmp_path: Path, family: str) -> None:
    """Else an agent that trains and saves as everybody does is refused, and its run ends without a score."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **MORE.get(family, {})})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    here = tmp_path / "base" / "config.json"
    here.write_text(json.dumps(as_the_hub_has_it(json.loads(here.read_text()))))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    merged: Any = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian"))
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    base = BaseModel.read(tmp_path / "base", "0" * 64)
    for name in ("one", "shards", "merged"):
        saved = json.loads((tmp_path / name / "config.json").read_text())
        mine, theirs = read(saved), read(base.config)
        assert isinstance(mine, dict) and isinstance(theirs, dict), (mine, theirs)
        assert first_difference(told(mine), told(theirs)) is None
        with ExitStack() as stack:  # names and shapes; the config was compared above, without a process for each
            fd = os.open(tmp_path / name, os.O_RDONLY)
            stack.callback(os.close, fd)
            assert lint_folder(fd, BaseModel(saved, base.shapes, base.content_hash), stack).tensors
    other = read({**saved, "model_type": family, "num_hidden_layers": 3, "n_layer": 3, "layer_types": None})
    assert isinstance(theirs, dict)
    assert isinstance(other, str) or first_difference(told(other), told(theirs)) is not None


OTHER_MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("older rope_theta", {"rope_parameters": None, "rope_theta": 20000.0}, "rope_parameters.rope_theta"),
    ("rope scaling", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}, "rope_parameters.factor"),
    ("older rope scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.factor"),
    ("theta hidden in the scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
    ("rope for each kind of layer", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention"),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("sliding window", {"sliding_window": 16}, "sliding_window"),
    ("other layers", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "field"), [row[1:] for row in OTHER_MODELS], ids=[row[0] for row in OTHER_MODELS])
def test_what_transformers_makes_of_it_is_another_model(changes: dict[str, Any], field: str) -> None:
    mine, theirs = read({**tiny_config(), **changes}), read(tiny_config())
    assert isinstance(mine, dict) and isinstance(theirs, dict)
    found = first_difference(told(mine), told(theirs))
    assert found is not None and found[0] == field


@pytest.mark.slow
def test_a_config_in_other_words_is_accepted_and_a_hostile_one_refused(tmp_path: Path) -> None:
    """Through the intake, with the process that asks transformers."""
    desk, tiny = Desk(tmp_path), tiny_config()
    save(desk.checkpoint, changed(tiny_tensors()), as_the_hub_has_it(tiny))
    desk.accepted()
    for part in ({"hidden_size_x": [1], "rope_parameters": {"rope_type": "yarn"}}, {"layer_types": ["x"] * 2}):
        with pytest.raises(Refused) as refused:
            compare_config({**tiny, **part}, tiny)
        assert refused.value.code == "config_differs" and "config.json" in refused.value.message


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1"])
def test_a_config_with_infinity_is_read(family: str) -> None:
    """Catches hybrid families refused because their `time_step_limit`, which transformers writes as a table, could not be read."""
    from transformers import AutoConfig

    saved = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    defaults = ("time_step_limit", "rope_parameters", "layer_types", "chunk_size")
    compare_config({name: value for name, value in saved.items() if name not in defaults}, saved)
    compare_config(saved, saved)

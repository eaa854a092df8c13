"""Checkpoints of many families, saved again by the installed transformers, are the base model's, whatever words its config.json has."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from checkpoints import Desk, changed, save, tiny_config, tiny_tensors

from autorl_hpc.errors import Refused
from autorl_hpc.supervise.intake import lint_folder
from autorl_hpc.supervise.lint import BaseModel
from autorl_hpc.supervise.model_config import compare_config

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRID = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    "zamba": {**HYBRID, "num_hidden_layers": 6, "num_key_value_heads": 4, "attention_head_dim": 16},
    "jamba": {**HYBRID, "num_experts": 2, "use_mamba_kernels": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": MOE,
    "qwen3_moe": MOE,
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    },
}  # fmt: skip
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2"),
    *("olmo", "olmo2", "olmo3", "phi", "phi3", "granite", "smollm3", "starcoder2", "stablelm", "glm", "glm4"),
    *("nemotron", "helium", "exaone4", "ernie4_5", "arcee", "seed_oss", "apertus", "hunyuan_v1_dense"),
    *("gpt2", "gpt_neox", "opt", "bloom"),
    *("mamba", "falcon_mamba", "mamba2", "zamba", "jamba", "bamba", "falcon_h1", "granitemoehybrid"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"),
)
asked_here = checkpoints.asked_here


def as_the_hub_has_it(config: dict[str, Any]) -> dict[str, Any]:
    """The same model in the words of version 4: rope and dtype at the top, and what follows from other fields left out."""
    auto: dict[str, Any] = {name: "auto" for name in ("time_step_rank", "mamba_dt_rank") if name in config}
    gelu = {"hidden_act": "gelu", "hidden_activation": None} if config["model_type"] == "gemma" else {}
    follows = () if config["model_type"] == "granitemoehybrid" else ("layer_types",)
    older = {name: value for name, value in config.items() if name not in ("dtype", "rope_parameters", *follows)}
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        older |= {"rope_theta": rope["full_attention"]["rope_theta"]}
        older |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    elif "rope_theta" in rope:
        older |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    return {**older, **auto, **gelu, "torch_dtype": "float32", "transformers_version": "4.50.0"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_again_is_the_same_model(tmp_path: Path, asked_here: None, family: str) -> None:
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
    # peft refuses out_proj of a Mamba layer
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=["out_proj"], init_lora_weights="gaussian")
    merged: Any = get_peft_model(model, lora)
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    base = BaseModel.read(tmp_path / "base", "0" * 64)
    for name in ("one", "shards", "merged"):
        with ExitStack() as stack:
            fd = os.open(tmp_path / name, os.O_RDONLY)
            stack.callback(os.close, fd)
            assert lint_folder(fd, base, stack).tensors
    saved = json.loads((tmp_path / name / "config.json").read_text())
    layers = {"num_hidden_layers": 7, "n_layer": 7, "layer_types": None, "layers_block_type": None}
    activations = dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "relu6")
    for changes in (layers, {**activations, "layer_norm_epsilon": 0.5}):
        with pytest.raises(Refused) as refused:
            compare_config({**saved, **changes}, base.config)
        assert refused.value.code == "config_differs"


OTHER_MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("older rope_theta", {"rope_parameters": None, "rope_theta": 20000.0}, "rope_parameters.rope_theta"),
    ("rope scaling", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}, "rope_parameters.factor"),
    ("older rope scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.factor"),
    ("theta hidden in the scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
    ("rope for each kind of layer", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention"),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("sliding window", {"sliding_window": 16}, "sliding_window"),
    ("no sliding window", {"model_type": "mistral", "sliding_window": None}, "sliding_window"),
    ("other layers", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "field"), [row[1:] for row in OTHER_MODELS], ids=[row[0] for row in OTHER_MODELS])
def test_what_transformers_makes_of_it_is_another_model(changes: dict[str, Any], field: str, asked_here: None) -> None:
    base = tiny_config() | ({"model_type": changes["model_type"]} if "model_type" in changes else {})
    with pytest.raises(Refused, match=f"field {re.escape(field)} is "):
        compare_config({**base, **changes}, base)


@pytest.mark.slow
def test_a_config_in_other_words_is_accepted_and_a_hostile_one_refused(tmp_path: Path) -> None:
    """Through the intake, with the process that asks transformers."""
    desk, tiny = Desk(tmp_path), tiny_config()
    save(desk.checkpoint, changed(tiny_tensors()), as_the_hub_has_it(tiny))
    desk.accepted()
    with pytest.raises(Refused) as refused:
        compare_config({**tiny, "layer_types": ["x"] * 2}, tiny)
    assert refused.value.code == "config_differs" and "transformers can't read it" in refused.value.message

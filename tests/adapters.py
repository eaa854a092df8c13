"""LoRA adapters for the tiny model: made by peft, and made by hand for what peft would not write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import TINY, tiny_tensors
from weights import Tensors, write_safetensors

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.supervise.lint import BaseModel

ADAPTER = "adapter_model.safetensors"
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
PREFIX = "base_model.model."

PLAIN: dict[str, Any] = {
    "base_model_name_or_path": "autorl/tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "lora_alpha": 16,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "up_proj"],
    "task_type": "CAUSAL_LM",
}
"""What matters of the config that peft writes."""


def factors(*modules: str, rank: int = 4, scale: float = 0.05) -> Tensors:
    """A and B of some layers, fp32."""
    rng, shapes = np.random.default_rng(1), {name: values.shape for name, (_, values) in tiny_tensors().items()}
    found: Tensors = {}
    for module in modules:
        out, columns = shapes[f"{module}.weight"]
        for side, shape in (("A", (rank, columns)), ("B", (out, rank))):
            values = (scale * rng.standard_normal(shape)).astype(np.float32)
            found[f"{PREFIX}{module}.lora_{side}.weight"] = ("F32", values)
    return found


def write_adapter(folder: Path, config: Mapping[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """An adapter made by hand: `config` changes fields of PLAIN."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **(config or {})}))
    write_safetensors(folder / ADAPTER, factors(Q, UP) if tensors is None else tensors)
    return folder


def read_base(folder: Path) -> BaseModel:
    """A model folder as the base of a run."""
    return BaseModel.read(folder, folder_content_hash(folder))


def lay_base(folder: Path, dtype: str = "float32", *, untied: bool = False, shards: str = "1GB") -> BaseModel:
    """The tiny model saved by transformers in another dtype, with a head of its own, or in shards."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY)
    config.tie_word_embeddings = not untied
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, config=config, dtype=torch.float32)
    if untied:
        with torch.no_grad():
            model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight * 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shards)
    return read_base(folder)


def train_adapter(base: Path, folder: Path, stored: str = "float32", embeddings: Any = "auto", **config: Any) -> None:
    """An adapter as peft saves it, with every factor drawn at random, so that no delta is zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    made: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn_like(parameter.float()))
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, stored))
    made.save_pretrained(folder, save_embedding_layers=embeddings)


def merged_by_peft(base: Path, folder: Path) -> dict[str, Any]:
    """peft's own merge: tensors of torch by name, in the base's dtype."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(folder))
    return dict(model.merge_and_unload().state_dict())

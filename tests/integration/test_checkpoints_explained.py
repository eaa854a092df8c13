"""A folder that is not quite what was meant: the answer names the folder, the other base model, or the prefix that explains it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import ADAPTER, UP, Q, factors, write_adapter
from checkpoints import Desk, changed, save, tiny_tensors
from weights import Tensors, write_safetensors

from autorl_hpc.states import SubmissionState


def named(folder: Path, base: str) -> Path:
    """An adapter whose config names that base model."""
    write_adapter(folder, {"base_model_name_or_path": base})
    return folder


@pytest.mark.parametrize(
    ("below", "make", "kind"),
    [
        ("checkpoint-100", save, "a checkpoint"),
        ("train", write_adapter, "an adapter"),
        ("global_step_9/actor/huggingface", save, "a checkpoint"),
    ],
)
def test_a_checkpoint_that_lies_below_is_named(
    tmp_path: Path, below: str, make: Callable[[Path], Path], kind: str
) -> None:
    """A trainer's folder holds no model itself; of several the last one is named."""
    desk = Desk(tmp_path)
    make(desk.checkpoint / below)
    (desk.checkpoint / "checkpoint-20").mkdir(parents=True)
    if below == "checkpoint-100":
        save(desk.checkpoint / "checkpoint-20")
    answer = desk.refused()
    assert answer["code"] == "no_config" and f"{kind} lies in {below}" in answer["error"]
    assert f"submit that folder, {below}" in answer["advice"]


def test_a_link_below_is_not_followed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    save(tmp_path / "elsewhere" / "deep")
    (desk.checkpoint / "x").mkdir(parents=True)
    (desk.checkpoint / "x" / "deep").symlink_to(tmp_path / "elsewhere" / "deep")
    assert desk.refused()["error"] == "config.json is missing"


def test_base_weights_beside_an_adapter_are_told(tmp_path: Path) -> None:
    """A merge tool that left the base as it was: the score is the base model's, and the answer says where the adapter lies."""
    desk = Desk(tmp_path)
    save(desk.checkpoint, tiny_tensors())
    write_adapter(desk.checkpoint / "lora_adapter")
    answer = desk.accepted()
    assert answer["is_base_model"] and "an adapter lies in output/v1/lora_adapter" in answer["advice"]
    save(desk.workspace / "output" / "v2", changed(tiny_tensors()))
    write_adapter(desk.workspace / "output" / "v2" / "lora_adapter")
    assert desk.submit("v2", "output/v2")["advice"] is None


@pytest.mark.parametrize("where", ["{w}/output/sft", "output/sft", "../output/sft", "./output/sft/"])
def test_an_adapter_on_a_model_of_the_agents_own_is_refused(tmp_path: Path, where: str) -> None:
    """It would be added to the base model without a word: 25.7 in the place of 52.0."""
    desk = Desk(tmp_path)
    save(desk.workspace / "output" / "sft", changed(tiny_tensors()))
    named(desk.checkpoint, where.format(w=desk.workspace))
    answer = desk.refused()
    assert answer["code"] == "adapter_base" and "output/sft" in answer["error"] and "autorl/tiny" in answer["error"]
    assert "merge_and_unload" in answer["advice"] and "$MODEL_PATH" in answer["advice"]


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("{w}/models/autorl/tiny", False),
        ("/elsewhere/Tiny", False),
        ("org/other-3B", True),
        ("/data/other\x1b[2J", True),
    ],
)
def test_an_adapter_that_names_another_base_model_is_told_so(tmp_path: Path, base: str, told: bool) -> None:
    desk = Desk(tmp_path)
    named(desk.checkpoint, base.format(w=desk.workspace))
    answer = desk.accepted()
    assert answer["status"] == SubmissionState.ACCEPTED and "\x1b" not in (answer["advice"] or "")
    assert ("was added to the base model of this run, autorl/tiny" in (answer["advice"] or "")) is told


def inside(wrapper: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(r"(layers\.\d+\.)", rf"\1{wrapper}", n): v for n, v in tensors.items()}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: value for name, value in tensors.items()}


def unmerged(tensors: Tensors) -> Tensors:
    found = {f"base_model.model.{n.replace('q_proj.', 'q_proj.base_layer.')}": v for n, v in tensors.items()}
    return {**found, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": tensors[UP_WEIGHT]}


UP_WEIGHT = "model.layers.0.mlp.up_proj.weight"
FULL: list[tuple[Callable[[Tensors], Tensors], str, str]] = [
    (prefixed("_orig_mod."), "'_orig_mod.'", "_orig_mod"),
    (prefixed("module."), "'module.'", "unwrap_model"),
    (prefixed("actor."), "'actor.'", "model.actor"),
    (prefixed("base_model.model."), "'base_model.model.'", "merge_and_unload()"),
    (prefixed("model.base_model."), "the prefix 'model.base_model.'", "unwrap_model"),
    (inside("base_model.model."), "names hold 'base_model.model.'", "merge_and_unload()"),
    (inside("_fsdp_wrapped_module."), "names hold '_fsdp_wrapped_module.'", "unwrap_model"),
    (inside("_checkpoint_wrapped_module."), "'_checkpoint_wrapped_module.'", "unwrap_model"),
    (lambda t: prefixed("_orig_mod.")(inside("_fsdp_wrapped_module.")(t)), "'_orig_mod.'", "_orig_mod"),
    (lambda t: inside("_some_wrapper.")(prefixed("_some_wrapper.")(t)), "'_some_wrapper.'", "unwrap_model"),
    (prefixed("actor.module._orig_mod."), "'actor.module._orig_mod.'", "_orig_mod"),
    (unmerged, "'base_model.model.'", "merge_and_unload()"),
    (lambda t: {n.removeprefix("model."): v for n, v in t.items()}, "lack the prefix 'model.'", "AutoModelForCausalLM"),
]


@pytest.mark.parametrize(("change", "words", "advice"), FULL)
def test_names_are_told_with_what_explains_them(
    tmp_path: Path, change: Callable[[Tensors], Tensors], words: str, advice: str
) -> None:
    desk = Desk(tmp_path)
    save(desk.checkpoint, change(changed(tiny_tensors())))
    answer = desk.refused()
    assert answer["code"] == "tensor_names" and words in answer["error"] and advice in answer["advice"]
    assert "missing " in answer["error"] and "unknown " in answer["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n: f"_orig_mod.{n}", ["'_orig_mod.'"]),
        (lambda n: n.replace(".weight", ".default.weight"), ["the adapter's name, 'default'"]),
        (lambda n: n.removeprefix("base_model.model."), ["lack the prefix 'base_model.model.'"]),
        (lambda n: n.replace("base_model.model.", "base_model.model.module."), ["'module.'"]),
    ],
)
def test_an_adapters_names_are_told_with_what_explains_them(
    tmp_path: Path, change: Callable[[str], str], words: list[str]
) -> None:
    desk = Desk(tmp_path)
    write_adapter(desk.checkpoint)
    tensors: Any = {change(name): value for name, value in factors(Q, UP).items()}
    write_safetensors(desk.checkpoint / ADAPTER, tensors)
    answer = desk.refused()
    assert answer["code"] == "adapter_names" and all(word in answer["error"] for word in words), answer
    assert json.dumps(answer["advice"]).count("save_pretrained")

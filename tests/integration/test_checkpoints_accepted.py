"""What is accepted, with which content hash, and what beside the weights is left aside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    EMBEDDING,
    HEAD,
    SINGLE,
    TINY,
    Desk,
    ask_transformers_here,
    changed,
    save,
    take,
    tiny_base,
    tiny_config,
    tiny_tensors,
    with_strange_names,
)
from weights import Tensors

from autorl_hpc.files import artifacts
from autorl_hpc.files.checkpoint import folder_content_hash


def test_what_transformers_saves_is_accepted_and_shards_don_t_change_the_hash(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    hashes = [tiny_base().content_hash]
    for dtype in ("float32", "bfloat16", "float16"):
        desk = Desk(tmp_path / dtype)
        model.to(getattr(torch, dtype)).save_pretrained(desk.checkpoint)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(desk.checkpoint)
        many = desk.workspace / "output" / "many"
        model.save_pretrained(many, max_shard_size="50KB")
        assert len(list(many.glob("*.safetensors"))) > 1
        answer = desk.accepted()
        assert desk.submit("many", "output/many")["same_as"] == 1
        assert folder_content_hash(desk.artifact(answer)) == answer["content_hash"]
        hashes.append(answer["content_hash"])
    assert len(set(hashes)) == 4


def hash_of(tmp: Path, name: str, tensors: Tensors) -> str:
    return take(save(tmp / name, tensors), tmp / f"copy of {name}").content_hash


def test_two_tensors_exchanged_change_the_hash(tmp_path: Path) -> None:
    tensors = changed(tiny_tensors())
    first = hash_of(tmp_path, "a", tensors)
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    assert hash_of(tmp_path, "b", tensors) != first


def test_a_tied_model_with_its_own_equal_head_has_the_hash_without_it(tmp_path: Path) -> None:
    tensors = changed(tiny_tensors())
    without = hash_of(tmp_path, "a", tensors)
    desk = Desk(tmp_path / "world")
    save(desk.checkpoint, {**tensors, HEAD: tensors[EMBEDDING]})
    answer = desk.accepted()
    assert answer["content_hash"] == without
    kept = json.loads((desk.artifact(answer) / artifacts.READY_NAME).read_bytes())
    assert kept["not_in_hash"] == [HEAD]
    assert folder_content_hash(desk.artifact(answer), drop=frozenset({HEAD})) == without


def files(**texts: str) -> Callable[[Path], None]:
    """Lays files, `__` standing for a dot."""

    def add(folder: Path) -> None:
        for name, text in texts.items():
            (folder / name.replace("__", ".")).write_text(text)

    return add


def with_subfolders(folder: Path) -> None:
    """What lies in them is never looked at."""
    (folder / "logs").mkdir()
    os.mkfifo(folder / "logs" / "fifo")
    (folder / "logs" / "link").symlink_to("/etc/passwd")
    (folder / "checkpoint-100").mkdir()
    (folder / "checkpoint-100" / "pytorch_model.bin").write_bytes(b"x")


def with_whole_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)


ENDLESS = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
SAMPLING = {"do_sample": True, "temperature": 5.0, "suppress_tokens": [1, 2], "eos_token_id": None}
BESIDE: list[tuple[str, Callable[[Path], None]]] = [
    ("nothing", files()),
    ("special tokens", files(tokenizer_config__json='{"extra_special_tokens": ["<a>", "<b>"]}')),
    ("endless template", files(chat_template__jinja=ENDLESS)),
    ("whole tokenizer", with_whole_tokenizer),
    ("ids beyond the embedding", files(added_tokens__json='{"<x>": 1000000}')),
    ("sampling", files(generation_config__json=json.dumps(SAMPLING))),
    ("training state", files(optimizer__pt="K", training_args__bin="cos\nsystem", trainer_state__json="no JSON")),
    ("subfolders", with_subfolders),
    ("strange names", with_strange_names),
]


@pytest.mark.parametrize("add", [row[1] for row in BESIDE], ids=[row[0] for row in BESIDE])
def test_what_lies_beside_the_weights_is_left_aside(tmp_path: Path, add: Callable[[Path], None]) -> None:
    plain = take(save(tmp_path / "plain"), tmp_path / "copy-of-plain").content_hash
    desk = Desk(tmp_path / "world")
    add(save(desk.checkpoint))
    beside = set(os.listdir(desk.checkpoint)) - {SINGLE, "config.json"}
    answer = desk.accepted()
    assert answer["content_hash"] == plain and len(answer["ignored_files"]) == len(beside)
    copied = set(os.listdir(desk.artifact(answer))) - {artifacts.READY_NAME, "refs"}
    assert copied == {SINGLE}, "something else was copied"


OLDER = {key: value for key, value in tiny_config().items() if key not in ("rope_parameters", "dtype", "head_dim")} | {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
}
"""As transformers 4 writes it."""

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("as it was", tiny_config()),
    ("older transformers", OLDER),
    ("older, whole number", {**OLDER, "rope_theta": 10000}),
    ("both ways, the same", {**tiny_config(), "rope_theta": 10000.0}),
    ("scaling that is none", {**OLDER, "rope_scaling": {"type": "default"}}),
    ("another dtype", {**tiny_config(), "dtype": "bfloat16"}),
    ("training options", {**tiny_config(), "use_cache": False, "attention_dropout": 0.1, "initializer_range": 1.0}),
    ("another end", {**tiny_config(), "eos_token_id": [0, 1], "bos_token_id": 5}),
    ("a field of the future", {**tiny_config(), "new_in_6": True}),
    ("all layers alike", {**tiny_config(), "layer_types": ["full_attention", "full_attention"]}),
]


@pytest.mark.parametrize("config", [row[1] for row in CONFIGS], ids=[row[0] for row in CONFIGS])
def test_configs_that_say_the_same_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    ask_transformers_here(monkeypatch)
    desk = Desk(tmp_path)
    save(desk.checkpoint, config=config)
    desk.accepted()

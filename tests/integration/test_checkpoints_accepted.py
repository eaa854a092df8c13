"""What is accepted, with which content hash, and what beside the weights is left aside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    EMBEDDING,
    HEAD,
    SINGLE,
    TINY,
    Desk,
    changed,
    save,
    take,
    tiny_base,
    tiny_config,
    tiny_tensors,
    with_strange_names,
)

from autorl_hpc.files import artifacts
from autorl_hpc.files.checkpoint import INDEX_NAME, folder_content_hash


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def test_the_base_model_itself_has_the_base_s_hash(folder: Path, target: Path) -> None:
    save(folder, tiny_tensors())
    copied = take(folder, target)
    assert copied.content_hash == tiny_base().content_hash == folder_content_hash(target)
    assert (target / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_dtype_is_accepted_and_shards_don_t_change_the_hash(tmp_path: Path, dtype: str) -> None:
    """Written by torch and safetensors, as trainers do."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    tensors = {
        name: torch.from_numpy(values).to(kind).contiguous() for name, (_, values) in changed(tiny_tensors()).items()
    }
    single, reversed_, shards = tmp_path / "single", tmp_path / "reversed", tmp_path / "shards"
    for path in (single, reversed_, shards):
        save(path)
        (path / SINGLE).unlink()
    save_file(tensors, single / SINGLE, metadata={"format": "pt"})
    save_file(dict(reversed(tensors.items())), reversed_ / SINGLE, metadata={"saved": "later"})
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in parts.items():
        save_file({name: tensors[name] for name in held}, shards / shard)
    index = {name: shard for shard, held in parts.items() for name in held}
    (shards / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    hashes = set()
    for path in (single, reversed_, shards):
        desk = Desk(tmp_path / "worlds" / path.name)
        shutil.copytree(path, desk.checkpoint)
        answer = desk.accepted()
        assert folder_content_hash(desk.artifact(answer)) == answer["content_hash"]
        hashes.add(answer["content_hash"])
    assert len(hashes) == 1


def test_what_transformers_saves_is_accepted(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = take(tmp_path / "one", tmp_path / "a"), take(tmp_path / "many", tmp_path / "b")
    assert one.content_hash == many.content_hash != tiny_base().content_hash
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert take(tmp_path / "half", tmp_path / "c").content_hash != one.content_hash


def test_one_changed_value_changes_the_hash(tmp_path: Path) -> None:
    tensors = changed(tiny_tensors())
    first = take(save(tmp_path / "a", tensors), tmp_path / "copy-a").content_hash
    values = tensors[EMBEDDING][1]
    values[0, 0] = np.nextafter(values[0, 0], np.float32(1))
    assert take(save(tmp_path / "b", tensors), tmp_path / "copy-b").content_hash != first


def test_two_tensors_exchanged_change_the_hash(tmp_path: Path) -> None:
    tensors = changed(tiny_tensors())
    first = take(save(tmp_path / "a", tensors), tmp_path / "copy-a").content_hash
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    assert take(save(tmp_path / "b", tensors), tmp_path / "copy-b").content_hash != first


def test_a_tied_model_with_its_own_equal_head_has_the_hash_without_it(tmp_path: Path) -> None:
    tensors = changed(tiny_tensors())
    without = take(save(tmp_path / "a", tensors), tmp_path / "copy-a")
    with_head = take(save(tmp_path / "b", {**tensors, HEAD: tensors[EMBEDDING]}), tmp_path / "copy-b")
    assert with_head.content_hash == without.content_hash
    assert with_head.not_in_hash == (HEAD,) and without.not_in_hash == ()
    assert folder_content_hash(tmp_path / "copy-b", drop=frozenset(with_head.not_in_hash)) == without.content_hash
    desk = Desk(tmp_path / "world")
    shutil.copytree(tmp_path / "b", desk.checkpoint)
    assert desk.accepted()["content_hash"] == without.content_hash


def with_list_of_special_tokens(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["<a>", "<b>"]}))


def with_endless_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    )


def with_whole_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)


def with_ids_beyond_the_embedding(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<x>": 1000000}')


def with_sampling(folder: Path) -> None:
    config = {
        "do_sample": True,
        "temperature": 5.0,
        "repetition_penalty": 9.0,
        "suppress_tokens": [1, 2],
        "eos_token_id": None,
    }
    (folder / "generation_config.json").write_text(json.dumps(config))


def with_training_state(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"\x80\x04K\x01." * 1000)
    (folder / "training_args.bin").write_bytes(b"cos\nsystem\n")
    (folder / "trainer_state.json").write_text("not even JSON")


def with_subfolders(folder: Path) -> None:
    """What lies in them is never looked at."""
    (folder / "logs").mkdir()
    os.mkfifo(folder / "logs" / "fifo")
    (folder / "logs" / "link").symlink_to("/etc/passwd")
    (folder / "checkpoint-100").mkdir()
    (folder / "checkpoint-100" / "pytorch_model.bin").write_bytes(b"x")


def with_nothing_else(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    "add",
    [
        with_nothing_else,
        with_list_of_special_tokens,
        with_endless_template,
        with_whole_tokenizer,
        with_ids_beyond_the_embedding,
        with_sampling,
        with_training_state,
        with_subfolders,
        with_strange_names,
    ],
)
def test_what_lies_beside_the_weights_is_left_aside(tmp_path: Path, add: Callable[[Path], None]) -> None:
    plain = take(save(tmp_path / "plain"), tmp_path / "copy-of-plain").content_hash
    desk = Desk(tmp_path / "world")
    add(save(desk.checkpoint))
    beside = set(os.listdir(desk.checkpoint)) - {SINGLE, "config.json"}
    answer = desk.accepted()
    assert answer["content_hash"] == plain and len(answer["ignored_files"]) == len(beside)
    copied = set(os.listdir(desk.artifact(answer))) - {artifacts.READY_NAME, "refs"}
    assert copied == {SINGLE}, "something else was copied"


def older_config() -> dict[str, Any]:
    """As transformers 4 writes it."""
    config = tiny_config()
    del config["rope_parameters"], config["dtype"], config["head_dim"]
    return {
        **config,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "transformers_version": "4.40.0",
    }


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("as it was", tiny_config()),
    ("older transformers", older_config()),
    ("older, whole number", {**older_config(), "rope_theta": 10000}),
    ("both ways, the same", {**tiny_config(), "rope_theta": 10000.0}),
    ("scaling that is none", {**older_config(), "rope_scaling": {"type": "default"}}),
    ("another dtype", {**tiny_config(), "dtype": "bfloat16"}),
    ("training options", {**tiny_config(), "use_cache": False, "attention_dropout": 0.1, "initializer_range": 1.0}),
    ("another end", {**tiny_config(), "eos_token_id": [0, 1], "bos_token_id": 5}),
    ("a field of the future", {**tiny_config(), "new_in_6": True}),
    ("all layers alike", {**tiny_config(), "layer_types": ["full_attention", "full_attention"]}),
]


@pytest.mark.parametrize("config", [row[1] for row in CONFIGS], ids=[row[0] for row in CONFIGS])
def test_configs_that_say_the_same_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    desk = Desk(tmp_path)
    save(desk.checkpoint, config=config)
    desk.accepted()

"""Every row of docs/checkpoints.md: what is accepted with which content hash, what is refused with which code and advice."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
    lint_only,
    raw_parts,
    refusal,
    save,
    save_shards,
    take,
    tiny_base,
    tiny_config,
    tiny_tensors,
    write_raw,
)
from weights import Tensors, write_safetensors

from autorl_hpc.errors import Refused
from autorl_hpc.files import artifacts
from autorl_hpc.files.checkpoint import INDEX_NAME, folder_content_hash, tensors_of
from autorl_hpc.states import Fault
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise.basemodel import BaseModel
from autorl_hpc.supervise.copying import copy_checkpoint
from autorl_hpc.supervise.lint import lint_folder

Build = Callable[[Path], object]
QUICK_S = 2.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


# --- accepted ---


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
    hashes = {take(path, tmp_path / f"copy-of-{path.name}").content_hash for path in (single, reversed_, shards)}
    assert len(hashes) == 1
    assert hashes == {folder_content_hash(tmp_path / "copy-of-shards")}


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


def with_strange_names(folder: Path) -> None:
    for name in (b"\xff\xfe.txt", b"new\nline", b"\x1b[2J", b"a" * 255):
        with open(os.path.join(os.fsencode(folder), name), "wb"):
            pass


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
    add(save(tmp_path / "full"))
    assert take(tmp_path / "full", tmp_path / "copy").content_hash == plain
    assert os.listdir(tmp_path / "copy") == [SINGLE], "something else was copied"


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
def test_configs_that_say_the_same_are_accepted(folder: Path, target: Path, config: dict[str, Any]) -> None:
    take(save(folder, config=config), target)


# --- refused ---

REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("rope_theta", {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}, "rope_theta"),
    ("older rope_theta", {"rope_parameters": None, "rope_theta": 20000.0}, "rope_theta"),
    ("rope two ways", {"rope_theta": 20000.0}, "rope_theta"),
    ("rope scaling", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("older rope scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ("theta hidden in the scaling", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"rope_theta": 5.0}}, "rope_theta"),
    ("rope for each kind of layer", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters"),
    ("more layers", {"num_hidden_layers": 3}, "num_hidden_layers"),
    ("fewer layers", {"num_hidden_layers": 1}, "num_hidden_layers"),
    ("another architecture", {"model_type": "qwen2"}, "model_type"),
    ("larger vocabulary", {"vocab_size": 500}, "vocab_size"),
    ("untied", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("another norm", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("another activation", {"hidden_act": "gelu"}, "hidden_act"),
    ("other heads", {"num_attention_heads": 8}, "num_attention_heads"),
    ("other key-value heads", {"num_key_value_heads": 4}, "num_key_value_heads"),
    ("longer context", {"max_position_embeddings": 4096}, "max_position_embeddings"),
    ("bias", {"attention_bias": True}, "attention_bias"),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("sliding window", {"sliding_window": 16}, "sliding_window"),
    ("other layers", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("NaN", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"), [row[1:] for row in REFUSED_CONFIGS], ids=[row[0] for row in REFUSED_CONFIGS]
)
def test_a_config_of_another_model_is_refused(folder: Path, target: Path, changes: dict[str, Any], field: str) -> None:
    refused = refusal(save(folder, config={**tiny_config(), **changes}), target)
    assert refused.code == "config_differs" and f"field {field} is" in refused.message
    assert "config.json" in refused.message and "only weights may change" in refused.advice


def write_config(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adapter(folder: Path, base: str, size: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * size)


def adapter_alone(folder: Path) -> None:
    adapter(folder, "autorl/tiny", 1000)
    shutil.copyfile(TINY / "config.json", folder / "config.json")


def adapter_beside(folder: Path) -> None:
    save(folder)
    adapter(folder, "autorl/tiny", 40)


def index_names(name: str) -> Build:
    def build(folder: Path) -> None:
        save_shards(folder, 2)
        outside = folder.parent / "x"
        outside.mkdir()
        shutil.copyfile(TINY / SINGLE, outside / SINGLE)
        path = folder / INDEX_NAME
        edit(path, weight_map=dict.fromkeys(json.loads(path.read_text())["weight_map"], name))

    return build


def index_is(value: Any) -> Build:
    def build(folder: Path) -> None:
        save_shards(folder, 2)
        (folder / INDEX_NAME).write_text(value if isinstance(value, str) else json.dumps(value))

    return build


def shard_gone(folder: Path) -> None:
    save_shards(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def shard_cut(folder: Path) -> None:
    path = save_shards(folder, 2) / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def shard_longer(folder: Path) -> None:
    with open(save(folder) / SINGLE, "ab") as file:
        file.write(b"hidden")


def stray_shard(folder: Path) -> None:
    save_shards(folder, 2)
    shutil.copyfile(TINY / SINGLE, folder / "extra.safetensors")


def two_saves(folder: Path) -> None:
    save_shards(folder, 2)
    save(folder)


def two_files_without_index(folder: Path) -> None:
    (save_shards(folder, 2) / INDEX_NAME).unlink()


def tensor_in_two_shards(folder: Path) -> None:
    save_shards(folder, 2)
    tensors = changed(tiny_tensors())
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    second = "model-00002-of-00002.safetensors"
    held = {name: tensors[name] for name in tensors if index[name] == second or name == EMBEDDING}
    write_safetensors(folder / second, held)


def index_of_others(folder: Path) -> None:
    path = save_shards(folder, 2) / INDEX_NAME
    index = json.loads(path.read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    edit(path, weight_map={name: second if shard == first else first for name, shard in index.items()})


def with_header(change: Callable[[dict[str, Any]], object]) -> Build:
    """The tiny model with a header that is not quite right."""

    def build(folder: Path) -> None:
        header, data = raw_parts(save(folder) / SINGLE)
        made = change(header)
        write_raw(folder / SINGLE, header if made is None else made, data)

    return build


def set_field(field: str, value: Any) -> Build:
    def change(header: dict[str, Any]) -> None:
        header[EMBEDDING][field] = value

    return with_header(change)


def file_of(data: bytes) -> Build:
    def build(folder: Path) -> None:
        (save(folder) / SINGLE).write_bytes(data)

    return build


def twice_in_the_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)
    return (text[:-1] + ", " + json.dumps(EMBEDDING) + ": " + json.dumps(header[EMBEDDING]) + "}").encode()


def overlapping(header: dict[str, Any]) -> None:
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    header[first]["data_offsets"] = header[second]["data_offsets"]


def weights(change: Callable[[Tensors], Tensors]) -> Build:
    def build(folder: Path) -> None:
        save(folder, change(changed(tiny_tensors())))

    return build


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def one_value(name: str, value: float, kind: str = "F32") -> Build:
    """One bad value, the last of a tensor."""

    def change(tensors: Tensors) -> Tensors:
        values = tensors[name][1].copy()
        values.reshape(-1)[-1] = value
        if kind == "BF16":
            return {**tensors, name: ("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))}
        with np.errstate(over="ignore"):
            return {**tensors, name: (kind, values.astype(np.float16 if kind == "F16" else np.float32))}

    return weights(change)


def all_of(name: str, value: float) -> Build:
    return weights(lambda tensors: {**tensors, name: ("F32", np.full_like(tensors[name][1], value))})


def other_head(tensors: Tensors) -> Tensors:
    values = tensors[EMBEDDING][1].copy()
    values[3, 3] += 1
    return {**tensors, HEAD: ("F32", values)}


def stored_as(dtype: str, width: int) -> Build:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, EMBEDDING: (dtype, np.zeros((*tensors[EMBEDDING][1].shape, width), np.uint8))}

    def build(folder: Path) -> None:
        save(folder, change(changed(tiny_tensors())))
        header, data = raw_parts(folder / SINGLE)
        header[EMBEDDING]["shape"] = header[EMBEDDING]["shape"][:2]
        write_raw(folder / SINGLE, header, data)

    return build


def code(file: str, value: dict[str, Any]) -> Build:
    def build(folder: Path) -> None:
        save(folder)
        (folder / "modeling_evil.py").write_text("raise SystemExit")
        old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**old, **value}))

    return build


class Evil:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch PICKLE-WAS-RUN",)


def pickle_only(folder: Path) -> None:
    import pickle

    (save(folder) / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def nothing_there(folder: Path) -> None:
    folder.mkdir()


def only_config(folder: Path) -> None:
    (save(folder) / SINGLE).unlink()


def config_is(text: str | bytes) -> Build:
    def build(folder: Path) -> None:
        write_config(save(folder), text)

    return build


REFUSED: list[tuple[str, Build, str, list[str], str]] = [
    ("adapter only", adapter_alone, "adapter_only", ["adapter_config.json"], "merge_and_unload"),
    ("adapter of nothing", lambda f: adapter(f, "../../evil", 40), "no_config", ["config.json"], "save_pretrained"),
    ("adapter beside weights", adapter_beside, "adapter_beside_model", ["adapter_config.json"], "merge_and_unload"),
    ("index climbs out", index_names("../x/model.safetensors"), "index_outside", ["'../x/model.safetensors'"], "save_pretrained"),
    ("index is absolute", index_names("/etc/x.safetensors"), "index_outside", ["/etc/x"], "save_pretrained"),
    ("index with a null byte", index_names("a\0.safetensors"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index with a newline", index_names("a.safetensors\n"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index with a hidden name", index_names(".safetensors"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index with broken text", index_names("\ud800.safetensors"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index not JSON", index_is("{"), "not_json", [INDEX_NAME], "save"),
    ("index a list", index_is([]), "not_json", [INDEX_NAME], "save"),
    ("index without map", index_is({"metadata": {}}), "index_broken", [INDEX_NAME, "weight_map"], "save_pretrained"),
    ("index of lists", index_is({"weight_map": {"a": ["b"]}}), "index_broken", [INDEX_NAME], "save_pretrained"),
    ("index nested for ever", index_is("[" * 100_000), "not_json", [INDEX_NAME], "save"),
    ("shard missing", shard_gone, "shard_missing", ["model-00002-of-00003.safetensors"], "wait for the save to end"),
    ("shard cut off", shard_cut, "shard_truncated", ["model-00002-of-00002.safetensors"], "after the save has ended"),
    ("bytes behind", shard_longer, "trailing_bytes", [SINGLE], "save"),
    ("shard nobody names", stray_shard, "ambiguous_weights", ["extra.safetensors"], "empty folder"),
    ("file and index", two_saves, "ambiguous_weights", [SINGLE, INDEX_NAME], "remove the older save"),
    ("shards without index", two_files_without_index, "ambiguous_weights", [INDEX_NAME], "empty folder"),
    ("tensor in two shards", tensor_in_two_shards, "tensor_twice", ["two shards"], "empty folder"),
    ("index against shards", index_of_others, "index_broken", [INDEX_NAME], "empty folder"),
    ("empty file", file_of(b""), "header_broken", [SINGLE, "0 bytes"], "save"),
    ("seven bytes", file_of(b"1234567"), "header_broken", [SINGLE], "save"),
    ("header longer than the file", file_of(b"\xff" * 8 + b"{}"), "header_broken", [SINGLE], "save"),
    ("header not JSON", file_of(b"\x04" + b"\0" * 7 + b"abcd"), "not_json", [SINGLE], "save"),
    ("header not UTF-8", file_of(b"\x04" + b"\0" * 7 + b'{"\xff}'), "not_json", [SINGLE], "save"),
    ("header a list", with_header(lambda h: b"[]"), "header_broken", [SINGLE], "save"),
    ("header of nothing", with_header(lambda h: b"{}"), "no_tensors", [SINGLE], "save"),
    ("header with a name twice", with_header(twice_in_the_header), "not_json", ["twice"], "save"),
    ("header far too long", with_header(lambda h: b'{"__metadata__":{"a":"' + b"x" * (1 << 21) + b'"}}'), "header_broken", [SINGLE, "bytes"], "save"),
    ("overlap", with_header(overlapping), "header_broken", ["overlap"], "save"),
    ("dtype is a list", set_field("dtype", ["F32"]), "dtype_unsupported", [EMBEDDING], "bfloat16"),
    ("dtype unknown", set_field("dtype", "X" * 1000), "dtype_unsupported", [EMBEDDING], "bfloat16"),
    ("shape negative", set_field("shape", [-400, -64]), "header_broken", [EMBEDDING], "save"),
    ("shape of floats", set_field("shape", [400.0, 64]), "header_broken", [EMBEDDING], "save"),
    ("shape of booleans", set_field("shape", [True, 25600]), "header_broken", [EMBEDDING], "save"),
    ("shape huge", set_field("shape", [10**300, 64]), "header_broken", [EMBEDDING], "save"),
    ("shape no list", set_field("shape", 400), "header_broken", [EMBEDDING], "save"),
    ("offsets reversed", set_field("data_offsets", [102400, 0]), "header_broken", [EMBEDDING], "save"),
    ("offsets three", set_field("data_offsets", [0, 1, 2]), "header_broken", [EMBEDDING], "save"),
    ("offsets of nothing", set_field("data_offsets", None), "header_broken", [EMBEDDING], "save"),
    ("double precision", stored_as("F64", 8), "dtype_unsupported", [EMBEDDING, "F64"], "bfloat16"),
    ("eight bits", stored_as("F8_E4M3", 1), "dtype_unsupported", [EMBEDDING, "F8_E4M3"], "bfloat16"),
    ("integers", stored_as("I8", 1), "dtype_unsupported", [EMBEDDING, "I8"], "quantised"),
    ("tensor missing", weights(lambda t: without(t, "model.norm.weight")), "tensor_names", ["missing 1", "model.norm.weight"], "all its tensors"),
    ("tensor added", weights(lambda t: {**t, "value_head.weight": t["model.norm.weight"]}), "tensor_names", ["unknown 1", "value_head.weight"], "all its tensors"),
    ("module. prefix", weights(lambda t: {f"module.{n}": v for n, v in t.items()}), "tensor_names", ["'module.'"], "unwrap_model"),
    ("compiled prefix", weights(lambda t: {f"_orig_mod.{n}": v for n, v in t.items()}), "tensor_names", ["'_orig_mod.'"], "unwrap_model"),
    ("a layer less", weights(lambda t: {n: v for n, v in t.items() if ".layers.1." not in n}), "tensor_names", ["missing"], "all its tensors"),
    ("another shape", weights(lambda t: {**t, EMBEDDING: ("F32", t[EMBEDDING][1][:300])}), "tensor_shapes", [EMBEDDING, "[300, 64]", "[400, 64]"], "vocabulary size"),
    ("transposed", weights(lambda t: {**t, EMBEDDING: ("F32", np.ascontiguousarray(t[EMBEDDING][1].T))}), "tensor_shapes", [EMBEDDING], "architecture"),
    ("another head", weights(other_head), "untied_head", [HEAD, EMBEDDING], "tie_word_embeddings"),
    ("head of another shape", weights(lambda t: {**t, HEAD: ("F32", t[EMBEDDING][1][:10])}), "untied_head", [HEAD], "tie_word_embeddings"),
    ("NaN", one_value("model.layers.1.mlp.down_proj.weight", math.nan), "not_finite", ["down_proj", SINGLE], "earlier checkpoint"),
    ("Inf", one_value("model.norm.weight", math.inf), "not_finite", ["model.norm.weight"], "earlier checkpoint"),
    ("-Inf", one_value(EMBEDDING, -math.inf), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("NaN in bf16", one_value(EMBEDDING, math.nan, "BF16"), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("-Inf in bf16", one_value(EMBEDDING, -math.inf, "BF16"), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("overflow to fp16", one_value(EMBEDDING, 1e6, "F16"), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("zero head", all_of(EMBEDDING, 0.0), "zero_head", [EMBEDDING], "how it was saved"),
    ("negative zero head", all_of(EMBEDDING, -0.0), "zero_head", [EMBEDDING], "how it was saved"),
    ("auto_map of a known type", code("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}), "auto_map", ["config.json", "auto_map"], "remove auto_map"),
    ("auto_map of an unknown type", code("config.json", {"model_type": "evil", "auto_map": {}}), "auto_map", ["config.json"], "no code"),
    ("auto_map of a tokenizer", code("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}), "auto_map", ["tokenizer_config.json"], "no code"),
    ("auto_map further down", code("config.json", {"text_config": [{"auto_map": {}}]}), "auto_map", ["config.json"], "no code"),
    ("trust_remote_code", code("generation_config.json", {"trust_remote_code": True}), "auto_map", ["trust_remote_code"], "no code"),
    ("a file with code", code("config.json", {"custom_generate": "generate.py"}), "auto_map", ["custom_generate"], "no code"),
    ("pickle only", pickle_only, "pickle", ["pytorch_model.bin"], "safe_serialization=True"),
    ("empty folder", nothing_there, "no_config", ["config.json"], "save_pretrained"),
    ("only a config", only_config, "no_weights", ["safetensors"], "safe_serialization=True"),
    ("config not JSON", config_is("{"), "not_json", ["config.json"], "save"),
    ("config empty", config_is(""), "not_json", ["config.json"], "save"),
    ("config a list", config_is("[]"), "not_json", ["config.json"], "save"),
    ("config not UTF-8", config_is(b'{"a": "\xff"}'), "not_json", ["config.json"], "save"),
    ("config with a key twice", config_is('{"vocab_size": 1, "vocab_size": 400}'), "not_json", ["config.json", "twice"], "save"),
    ("config nested for ever", config_is('{"a":' * 100_000), "not_json", ["config.json"], "save"),
    ("config of 20 MB", config_is(" " * 20_000_000), "not_json", ["config.json"], "save"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "name", "words", "advice"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused(folder: Path, target: Path, build: Build, name: str, words: list[str], advice: str) -> None:
    build(folder)
    started = time.monotonic()
    refused = refusal(folder, target)
    assert time.monotonic() - started < QUICK_S
    assert refused.code == name, refused.message
    for word in words:
        assert word in refused.message, refused.message
    assert advice in refused.advice, refused.advice
    assert refused.fault is Fault.ARTIFACT
    assert len(refused.message) < 1000
    assert not Path("PICKLE-WAS-RUN").exists()


def test_an_untied_base_needs_its_head(folder: Path, target: Path) -> None:
    tiny = tiny_base()
    shapes = {**tiny.shapes, HEAD: tiny.shapes[EMBEDDING]}
    untied = BaseModel({**tiny.config, "tie_word_embeddings": False}, shapes, tiny.content_hash, tiny.elements)
    config = {**tiny_config(), "tie_word_embeddings": False}
    tensors = changed(tiny_tensors())
    refused = refusal(save(folder, tensors, config), target, untied)
    assert (refused.code, HEAD in refused.message) == ("tensor_names", True)
    head = np.zeros_like(tensors[EMBEDDING][1])
    refused = refusal(save(folder, {**tensors, HEAD: ("F32", head)}, config), target.with_name("b"), untied)
    assert (refused.code, HEAD in refused.message) == ("zero_head", True)
    head[0, 0] = 1
    take(save(folder, {**tensors, HEAD: ("F32", head)}, config), target.with_name("c"), untied)


# --- traps: refused before a byte is copied, and quickly ---


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "weights")
    return "special_file"


def fifo_as_weights(folder: Path) -> str:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    return "special_file"


def fifo_as_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return "special_file"


def unix_socket(folder: Path) -> str:
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes only
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("s")
    finally:
        os.chdir(here)
    return "special_file"


def device(folder: Path) -> str:
    try:
        os.mknod(folder / "zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device node is not permitted here")
    return "special_file"


def symlink_out(folder: Path) -> str:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(TINY / SINGLE)
    return "symlink"


def symlink_inside(folder: Path) -> str:
    (folder / "link").symlink_to(SINGLE)
    return "symlink"


def symlink_to_nothing(folder: Path) -> str:
    (folder / "link").symlink_to("nothing")
    return "symlink"


def hard_link(folder: Path) -> str:
    os.link(folder / SINGLE, folder.parent / "other-name")
    return "hard_link"


def one_terabyte(folder: Path) -> str:
    with open(folder / "optimizer.pt", "wb") as file:
        file.truncate(1 << 40)
    return "file_too_large"


def one_terabyte_of_weights(folder: Path) -> str:
    os.truncate(folder / SINGLE, 1 << 40)
    return "file_too_large"


def a_hundred_thousand_files(folder: Path) -> str:
    for number in range(100_000):
        os.close(os.open(folder / f"{number:06d}", os.O_CREAT | os.O_WRONLY))
    return "too_many_files"


TRAPS = [fifo, fifo_as_weights, fifo_as_config, unix_socket, device, symlink_out, symlink_inside, symlink_to_nothing, hard_link,
         one_terabyte, one_terabyte_of_weights, a_hundred_thousand_files]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.__name__)
def test_traps_are_refused_before_a_byte_is_copied(folder: Path, trap: Callable[[Path], str]) -> None:
    expected = trap(save(folder))
    started = time.monotonic()
    with pytest.raises(Refused) as caught:
        lint_only(folder)
    assert time.monotonic() - started < QUICK_S
    assert caught.value.code == expected and caught.value.advice


def large_base(layers: int) -> BaseModel:
    """A base model of about 3 GB in fp32, by its headers alone."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (32000, 1024), "model.norm.weight": (1024,)}
    for layer in range(layers):
        for name, shape in (("q", (1024, 1024)), ("k", (1024, 1024)), ("v", (1024, 1024)), ("o", (1024, 1024)), ("up", (4096, 1024)),
                            ("gate", (4096, 1024)), ("down", (1024, 4096)), ("norm1", (1024,)), ("norm2", (1024,))):  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return BaseModel({"model_type": "llama"}, shapes, "0" * 64, sum(math.prod(shape) for shape in shapes.values()))


def save_holes(folder: Path, base: BaseModel) -> int:
    """A checkpoint of that base in which only the header takes space; its size in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base.config))
    header: dict[str, Any] = {}
    position = 0
    for name, shape in base.shapes.items():
        end = position + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    write_raw(folder / SINGLE, header)
    size = (folder / SINGLE).stat().st_size + position
    os.truncate(folder / SINGLE, size)
    return size


def test_the_lint_of_3_gb_reads_the_header_alone(folder: Path) -> None:
    base = large_base(43)
    assert 3.0e9 < save_holes(folder, base) < 3.3e9
    times = []
    for _ in range(5):
        started = time.monotonic()
        lint_only(folder, base)
        times.append(time.monotonic() - started)
    assert min(times) < 0.05, times


# --- written to while it is copied ---

WIDE = BaseModel({"model_type": "llama"}, {EMBEDDING: (8192, 4096), "b": (4096,)}, "0" * 64, 8192 * 4096 + 4096)
"""128 MiB, so that a copy takes long enough to be disturbed."""


def save_wide(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors: Tensors = {name: ("F32", rng.random(shape, dtype=np.float32)) for name, shape in WIDE.shapes.items()}
    return save(folder, tensors, WIDE.config)


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Does `action` over and over while the body runs; it has been done once before that begins."""
    stop, once = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            action()
            once.set()
            time.sleep(0.002)

    thread = threading.Thread(target=work)
    thread.start()
    once.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def write_at(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0\0\0\0")


def rewrite(path: Path) -> None:
    """In place, the size stays, and the old time is put back."""
    info = path.stat()
    write_at(path, info.st_size - 4, os.urandom(3) + b"\0")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 8)


@pytest.mark.parametrize("action", [append, rewrite, cut], ids=lambda a: a.__name__)
def test_a_file_that_changes_during_the_copy_is_refused(
    folder: Path, target: Path, action: Callable[[Path], None]
) -> None:
    save_wide(folder)
    target.mkdir()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, WIDE, stack)
        with meanwhile(lambda: action(folder / SINGLE)), pytest.raises(Refused) as caught:
            copy_checkpoint(linted, WIDE, target)
    assert caught.value.code == "artifact_changed" and SINGLE in caught.value.message
    assert "after the save has ended" in caught.value.advice


def test_a_header_exchanged_after_the_lint_is_refused(folder: Path, target: Path) -> None:
    """Two tensors of equal shape change their names: by the old header the hash would be that of other weights."""
    _, data = raw_parts(save(folder) / SINGLE)
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    target.mkdir()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, tiny_base(), stack)
        text = (folder / SINGLE).read_bytes()[: -len(data)]
        swapped = text.replace(one.encode(), b"?").replace(two.encode(), one.encode()).replace(b"?", two.encode())
        assert len(swapped) == len(text) and swapped != text
        write_at(folder / SINGLE, 0, swapped)
        with pytest.raises(Refused) as caught:
            copy_checkpoint(linted, tiny_base(), target)
    assert caught.value.code == "artifact_changed"


def test_a_file_renamed_over_after_the_lint_changes_nothing(folder: Path, target: Path) -> None:
    """The open file is what was linted and is what is copied."""
    save(folder)
    before = (folder / SINGLE).read_bytes()
    target.mkdir()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, tiny_base(), stack)
        (folder / "other").write_bytes(b"something else")
        os.rename(folder / "other", folder / SINGLE)
        try:
            copy_checkpoint(linted, tiny_base(), target)
        except Refused as refused:  # the rename took the last name of the open file, which changes its ctime
            assert refused.code == "artifact_changed"
        else:
            assert (target / SINGLE).read_bytes() == before


# --- through the intake ---


def test_a_submission_overwritten_right_after_leaves_the_artifact_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.workspace / "output" / "v1")
    answer = desk.submit("v1", "output/v1")
    assert answer["status"] == "accepted" and answer["error"] is None
    artifact = desk.experiment.artifacts / answer["content_hash"]
    kept = (artifact / SINGLE).read_bytes()
    write_at(folder / SINGLE, 5000, b"\0" * 5000)  # in place: another name for the same file would show it
    assert (artifact / SINGLE).read_bytes() == kept
    assert folder_content_hash(artifact) == answer["content_hash"]
    assert len(tensors_of(artifact)) == len(tiny_base().shapes)
    second = desk.submit("v2", "output/v1")
    assert second["content_hash"] != answer["content_hash"] and second["same_as"] is None


def test_the_same_content_again_is_answered_from_the_ledger(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    save(desk.workspace / "output" / "v1")
    save_shards(desk.workspace / "output" / "v2", 3)
    first, second = desk.submit("v1", "output/v1"), desk.submit("v2", "output/v2")
    assert (first["same_as"], second["same_as"]) == (None, first["submission_id"])
    assert second["content_hash"] == first["content_hash"]
    assert len(desk.queued()) == 1 and len(desk.artifacts()) == 1


def test_a_copy_of_the_base_model_is_told_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    shutil.copytree(TINY, desk.workspace / "output" / "copy")
    answer = desk.submit("copy", "output/copy")
    assert answer["status"] == "accepted" and answer["is_base_model"] is True


def test_an_answer_names_code_advice_and_fault_and_holds_no_control_characters(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.workspace / "output" / "v1")
    (folder / SINGLE).unlink()
    with open(os.path.join(os.fsencode(folder), b"\xff\x1b[2J.bin"), "wb"):
        pass
    answer = desk.submit("v1", "output/v1")
    assert (answer["status"], answer["code"], answer["fault"], answer["score"]) == (
        "refused",
        "pickle",
        "artifact",
        None,
    )
    assert "\\udcff\\x1b[2J.bin" in answer["error"] and "safe_serialization" in answer["advice"]
    assert desk.view().refused()[0].message == answer["error"]


def test_names_that_are_no_text_are_left_aside_by_the_intake(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with_strange_names(save(desk.workspace / "output" / "v1"))
    answer = desk.submit("v1", "output/v1")
    assert answer["status"] == "accepted" and "\\udcff\\udcfe.txt" in answer["ignored_files"]


def test_a_refused_copy_leaves_nothing_behind(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    one_value(EMBEDDING, math.nan)(desk.workspace / "output" / "v1")
    assert desk.submit("v1", "output/v1")["code"] == "not_finite"
    assert desk.artifacts() == [] and desk.queued() == []


# --- artifacts, shared by runs ---


def copied_artifact(root: Path, name: str = "new") -> Path:
    """A copy that is ready to be installed."""
    folder = root / f".tmp-{name}"
    folder.mkdir()
    (folder / SINGLE).write_text(name)
    (folder / artifacts.READY_NAME).write_text("{}")
    return folder


def test_an_artifact_goes_with_the_last_run_that_needs_it(tmp_path: Path) -> None:
    artifacts.install(tmp_path, copied_artifact(tmp_path, "first"), "hash", "run-a")
    artifacts.install(tmp_path, copied_artifact(tmp_path, "second"), "hash", "run-b")
    assert os.listdir(tmp_path) == ["hash"] and (tmp_path / "hash" / SINGLE).read_text() == "first"
    artifacts.release(tmp_path, "hash", "run-a")
    assert artifacts.artifact_ready(tmp_path, "hash")
    artifacts.release(tmp_path, "hash", "run-b")
    assert os.listdir(tmp_path) == [] and not artifacts.hold(tmp_path, "hash", "run-c")


@pytest.mark.parametrize("remains", ["folder", "file"])
def test_remains_without_a_manifest_don_t_hold_an_artifact_s_name(tmp_path: Path, remains: str) -> None:
    if remains == "folder":
        (tmp_path / "hash").mkdir()
        (tmp_path / "hash" / SINGLE).write_text("half")
    else:
        (tmp_path / "hash").write_text("half")
    artifacts.install(tmp_path, copied_artifact(tmp_path), "hash", "run-a")
    assert os.listdir(tmp_path) == ["hash"] and (tmp_path / "hash" / SINGLE).read_text() == "new"


def test_an_artifact_that_can_t_be_installed_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    folder = copied_artifact(tmp_path)
    with pytest.raises(FileNotFoundError):
        artifacts.install(tmp_path / "gone", folder, "hash", "run-a")


def test_installing_and_releasing_at_once_loses_no_artifact(tmp_path: Path) -> None:
    """Whoever was told that it holds an artifact finds it there."""

    def use(run: int) -> int:
        for turn in range(100):
            artifacts.install(tmp_path, copied_artifact(tmp_path, f"{run}-{turn}"), "hash", f"run-{run}")
            wait_until = time.monotonic() + 1.0  # a release that met our reference puts the folder back
            while not artifacts.artifact_ready(tmp_path, "hash"):
                assert time.monotonic() < wait_until, "the artifact that this run holds is gone"
            artifacts.release(tmp_path, "hash", f"run-{run}")
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(use, range(4))) == 4
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_desk(tmp_path: Path) -> Iterator[tuple[Desk, Path]]:
    """A desk whose artifacts lie on a file system of 1 MiB, and a file there that takes the space of one artifact."""
    desk = Desk(tmp_path)
    disk = str(desk.experiment.artifacts)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield desk, desk.experiment.artifacts / "someone-else-s"
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_a_full_disk_is_waited_for_and_never_charged_to_the_agent(
    small_desk: tuple[Desk, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ballast = small_desk
    monkeypatch.setattr(intakes, "RETRY_CLUSTER_S", 0.0)
    save(desk.workspace / "output" / "v1")
    ballast.write_bytes(b"\0" * 700_000)
    manifest = desk.drop("v1", {"model_path": "output/v1"})
    for _ in range(3):
        assert desk.intake.poll() == 0
        assert manifest.exists() and not desk.view().submissions
        assert os.listdir(desk.workspace / "results") == []
        assert desk.artifacts() == [ballast.name], "an unfinished copy takes the space that is missing"
    ballast.unlink()
    assert desk.intake.poll() == 1
    assert desk.answer("v1")["status"] == "accepted" and not manifest.exists()
    assert len(desk.queued()) == 1


def test_a_full_disk_at_the_end_of_a_run_is_the_cluster_s_fault(small_desk: tuple[Desk, Path]) -> None:
    desk, ballast = small_desk
    save(desk.workspace / "output" / "v1")
    ballast.write_bytes(b"\0" * 700_000)
    desk.drop("v1", {"model_path": "output/v1"})
    assert desk.intake.poll(patient=False) == 1
    answer = desk.answer("v1")
    assert (answer["status"], answer["code"], answer["fault"]) == ("refused", "cluster", "cluster")
    assert os.strerror(errno.ENOSPC) in answer["error"]

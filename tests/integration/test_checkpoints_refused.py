"""Every row of docs/checkpoints.md that is refused: with which code and advice, through the real intake."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from broken import (
    Build,
    all_of,
    code,
    config_is,
    file_of,
    index_is,
    index_names,
    index_of_others,
    nothing_there,
    one_value,
    only_config,
    other_head,
    overlapping,
    pickle_only,
    set_field,
    shard_cut,
    shard_gone,
    shard_longer,
    stored_as,
    stray_shard,
    tensor_in_two_shards,
    twice_in_the_header,
    two_files_without_index,
    two_saves,
    weights,
    with_header,
    without,
)
from checkpoints import (
    EMBEDDING,
    HEAD,
    SINGLE,
    Desk,
    changed,
    save,
    take,
    tiny_base,
    tiny_config,
    tiny_tensors,
)
from weights import Tensors

from autorl_hpc.files.checkpoint import INDEX_NAME
from autorl_hpc.supervise.lint import BaseModel

asked_here = checkpoints.asked_here
REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("rope_theta", {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}, "rope_parameters.rope_theta"),
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
    ("NaN", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"), [row[1:] for row in REFUSED_CONFIGS], ids=[row[0] for row in REFUSED_CONFIGS]
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], field: str, asked_here: None
) -> None:
    desk = Desk(tmp_path)
    save(desk.checkpoint, config={**tiny_config(), **changes})
    answer = desk.refused()
    assert answer["code"] == "config_differs" and f"field {field} is" in answer["error"]
    assert "config.json" in answer["error"] and "only weights may change" in answer["advice"]


REFUSED: list[tuple[str, Build, str, list[str], str]] = [
    ("index climbs out", index_names("../x/model.safetensors"), "index_outside", ["'../x/model.safetensors'"], "save_pretrained"),
    ("index with a null byte", index_names("a\0.safetensors"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index with a hidden name", index_names(".safetensors"), "index_outside", ["weight_map"], "save_pretrained"),
    ("index not JSON", index_is("{"), "not_json", [INDEX_NAME], "save"),
    ("index without map", index_is({"metadata": {}}), "index_broken", [INDEX_NAME, "weight_map"], "save_pretrained"),
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
    ("header longer than the file", file_of(b"\xff" * 8 + b"{}"), "header_broken", [SINGLE], "save"),
    ("header not JSON", file_of(b"\x04" + b"\0" * 7 + b"abcd"), "not_json", [SINGLE], "save"),
    ("header of nothing", with_header(lambda h: b"{}"), "no_tensors", [SINGLE], "save"),
    ("header with a name twice", with_header(twice_in_the_header), "not_json", ["twice"], "save"),
    ("header far too long", with_header(lambda h: b'{"__metadata__":{"a":"' + b"x" * (1 << 21) + b'"}}'), "header_broken", [SINGLE, "bytes"], "save"),
    ("overlap", with_header(overlapping), "header_broken", ["overlap"], "save"),
    ("dtype is a list", set_field("dtype", ["F32"]), "dtype_unsupported", [EMBEDDING], "bfloat16"),
    ("dtype unknown", set_field("dtype", "X" * 1000), "dtype_unsupported", [EMBEDDING], "bfloat16"),
    ("shape negative", set_field("shape", [-400, -64]), "header_broken", [EMBEDDING], "save"),
    ("shape huge", set_field("shape", [10**300, 64]), "header_broken", [EMBEDDING], "save"),
    ("offsets reversed", set_field("data_offsets", [102400, 0]), "header_broken", [EMBEDDING], "save"),
    ("double precision", stored_as("F64", 8), "dtype_unsupported", [EMBEDDING, "F64"], "bfloat16"),
    ("integers", stored_as("I8", 1), "dtype_unsupported", [EMBEDDING, "I8"], "quantised"),
    ("tensor missing", weights(lambda t: without(t, "model.norm.weight")), "tensor_names", ["missing 1", "model.norm.weight"], "all its tensors"),
    ("tensor added", weights(lambda t: {**t, "value_head.weight": t["model.norm.weight"]}), "tensor_names", ["unknown 1", "value_head.weight"], "all its tensors"),
    ("biases of qwen2", weights(lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}), "tensor_names", ["unknown 1", "q_proj.bias"], "architecture"),
    ("a layer less", weights(lambda t: {n: v for n, v in t.items() if ".layers.1." not in n}), "tensor_names", ["missing"], "all its tensors"),
    ("another shape", weights(lambda t: {**t, EMBEDDING: ("F32", t[EMBEDDING][1][:300])}), "tensor_shapes", [EMBEDDING, "[300, 64]", "[400, 64]"], "vocabulary size"),
    ("another head", weights(other_head), "untied_head", [HEAD, EMBEDDING], "tie_word_embeddings"),
    ("head of another shape", weights(lambda t: {**t, HEAD: ("F32", t[EMBEDDING][1][:10])}), "untied_head", [HEAD], "tie_word_embeddings"),
    ("NaN", one_value("model.layers.1.mlp.down_proj.weight", math.nan), "not_finite", ["down_proj", SINGLE], "earlier checkpoint"),
    ("Inf", one_value("model.norm.weight", math.inf), "not_finite", ["model.norm.weight"], "earlier checkpoint"),
    ("NaN in bf16", one_value(EMBEDDING, math.nan, "BF16"), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("overflow to fp16", one_value(EMBEDDING, 1e6, "F16"), "not_finite", [EMBEDDING], "earlier checkpoint"),
    ("zero head", all_of(EMBEDDING, 0.0), "zero_head", [EMBEDDING], "how it was saved"),
    ("constant head", all_of(EMBEDDING, 0.25), "constant_head", [EMBEDDING], "how it was saved"),
    ("equal rows", weights(lambda t: {**t, EMBEDDING: ("F32", np.tile(t[EMBEDDING][1][:1], (400, 1)))}), "constant_head", [EMBEDDING, "rows"], "how it was saved"),
    ("auto_map of a known type", code("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}), "auto_map", ["config.json", "auto_map"], "remove auto_map"),
    ("auto_map of an unknown type", code("config.json", {"model_type": "evil", "auto_map": {}}), "auto_map", ["config.json"], "no code"),
    ("auto_map of a tokenizer", code("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}), "auto_map", ["tokenizer_config.json"], "no code"),
    ("auto_map further down", code("config.json", {"text_config": [{"auto_map": {}}]}), "auto_map", ["config.json"], "no code"),
    ("trust_remote_code", code("generation_config.json", {"trust_remote_code": True}), "auto_map", ["trust_remote_code"], "no code"),
    ("a file with code", code("config.json", {"custom_generate": "generate.py"}), "auto_map", ["custom_generate"], "no code"),
    *[(f"only {name}", pickle_only(name), "pickle", [name], "safe_serialization=True")
      for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.pkl", "last.ckpt")],
    ("empty folder", nothing_there, "no_config", ["config.json"], "save_pretrained"),
    ("only a config", only_config, "no_weights", ["safetensors"], "safe_serialization=True"),
    ("config not JSON", config_is("{"), "not_json", ["config.json"], "save"),
    ("config not UTF-8", config_is(b'{"a": "\xff"}'), "not_json", ["config.json"], "save"),
    ("config with a key twice", config_is('{"vocab_size": 1, "vocab_size": 400}'), "not_json", ["config.json", "twice"], "save"),
    ("config nested for ever", config_is('{"a":' * 100_000), "not_json", ["config.json"], "save"),
    ("config of 20 MB", config_is(" " * 20_000_000), "not_json", ["config.json"], "save"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "name", "words", "advice"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused(tmp_path: Path, build: Build, name: str, words: list[str], advice: str) -> None:
    desk = Desk(tmp_path)
    build(desk.checkpoint)
    answer = desk.refused()
    assert answer["code"] == name, answer["error"]
    for word in words:
        assert word in answer["error"], answer["error"]
    assert advice in answer["advice"], answer["advice"]
    assert answer["fault"] == "artifact"
    assert len(answer["error"]) < 1000
    assert not Path("PICKLE-WAS-RUN").exists()


def untied_base() -> BaseModel:
    tiny = tiny_base()
    shapes = {**tiny.shapes, HEAD: tiny.shapes[EMBEDDING]}
    return BaseModel({**tiny.config, "tie_word_embeddings": False}, shapes, tiny.content_hash)


def ones(tensors: Tensors) -> Any:
    return np.ones_like(tensors[EMBEDDING][1])


HEADS: list[tuple[str, Callable[[Tensors], Tensors], str | None, str]] = [
    ("no head", lambda t: t, "tensor_names", HEAD),
    ("zero head", lambda t: {**t, HEAD: ("F32", 0 * ones(t))}, "zero_head", HEAD),
    ("constant head", lambda t: {**t, HEAD: ("F32", 3 * ones(t))}, "constant_head", HEAD),
    ("zero embedding", lambda t: {**t, HEAD: t[EMBEDDING], EMBEDDING: ("F32", 0 * ones(t))}, "zero_head", EMBEDDING),
    ("constant embedding", lambda t: {**t, HEAD: t[EMBEDDING], EMBEDDING: ("F32", ones(t))}, "constant_head", EMBEDDING),
    ("a head of its own", lambda t: {**t, HEAD: t[EMBEDDING]}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("change", "name", "tensor"), [row[1:] for row in HEADS], ids=[row[0] for row in HEADS])
def test_heads_of_an_untied_base(
    tmp_path: Path, change: Callable[[Tensors], Tensors], name: str | None, tensor: str
) -> None:
    desk = Desk(tmp_path, untied_base())
    save(desk.checkpoint, change(changed(tiny_tensors())), {**tiny_config(), "tie_word_embeddings": False})
    if name is None:
        desk.accepted()
        return
    answer = desk.refused()
    assert answer["code"] == name and tensor in answer["error"], answer


BIGGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127"), "float32": float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("stored", "dtype"), [(s, d) for s in ("F32", "BF16", "F16") for d in ("float32", "bfloat16", "float16")]
)
def test_what_becomes_inf_in_the_recipes_dtype(tmp_path: Path, stored: str, dtype: str, sign: int) -> None:
    """The largest value that survives is accepted, the next one of its type refused: by torch's own conversion."""
    torch = pytest.importorskip("torch")
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    words = {"F32": torch.int32, "BF16": torch.int16, "F16": torch.int16}[stored]
    low, high = 0, {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[stored]

    def value(bits: int) -> Any:
        return torch.tensor([bits], dtype=words).view(kinds[stored])

    while high - low > 1:  # the first pattern that is Inf after the conversion
        middle = (low + high) // 2
        if bool(value(middle).to(getattr(torch, dtype)).isinf()):
            high = middle
        else:
            low = middle
    assert value(low).to(getattr(torch, dtype)).float().item() <= BIGGEST[dtype]
    one_value("model.norm.weight", sign * value(low).float().item(), stored)(tmp_path / "largest")
    take(tmp_path / "largest", tmp_path / "a", dtype=dtype)
    one_value("model.norm.weight", sign * value(high).float().item(), stored)(tmp_path / "next")
    desk = Desk(tmp_path / "world", dtype=dtype)
    shutil.copytree(tmp_path / "next", desk.checkpoint)
    answer, overflows = desk.refused(), bool(value(high).isfinite())
    assert answer["code"] == "not_finite" and (f"Inf in {dtype}" in answer["error"]) is overflows
    assert ("trained in" if overflows else "diverged") in answer["advice"]

"""Adapters that are refused: more than plain LoRA, for another model, broken, or hostile. Through the real intake."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ADAPTER, PREFIX, UP, Q, factors, read_base, write_adapter
from broken import Build
from checkpoints import EMBEDDING, SINGLE, TINY, Desk, raw_parts, save, tiny_config, write_raw
from weights import Tensors

MERGE = "merge_and_unload"
CONFIG = "adapter_config.json"


def config(**changes: Any) -> Build:
    return lambda folder: write_adapter(folder, changes)


def tensors(change: Callable[[Tensors], Tensors], **changes: Any) -> Build:
    return lambda folder: write_adapter(folder, changes, change(factors(Q, UP)))


def config_text(text: str) -> Build:
    def build(folder: Path) -> None:
        (write_adapter(folder) / CONFIG).write_text(text)

    return build


def weights_are(data: bytes) -> Build:
    def build(folder: Path) -> None:
        (write_adapter(folder) / ADAPTER).write_bytes(data)

    return build


def only(*names: str, also: tuple[str, ...] = ()) -> Build:
    def build(folder: Path) -> None:
        write_adapter(folder)
        for name in set(os.listdir(folder)) - set(names):
            (folder / name).unlink()
        for name in also:
            (folder / name).write_bytes(b"\x80\x04K\x01.")

    return build


def beside_weights(folder: Path) -> None:
    write_adapter(save(folder))


def pickle_beside_weights(folder: Path) -> None:
    (save(folder) / "adapter_model.bin").write_bytes(b"\x80\x04K\x01.")


def cut_off(folder: Path) -> None:
    path = write_adapter(folder) / ADAPTER
    os.truncate(path, path.stat().st_size - 100)


def of_eight_bits(folder: Path) -> None:
    header, data = raw_parts(write_adapter(folder) / ADAPTER)
    for entry in header.values():
        entry["dtype"] = "I8"
    write_raw(folder / ADAPTER, header, data)


def with_config_of(**changes: Any) -> Build:
    def build(folder: Path) -> None:
        (write_adapter(folder) / "config.json").write_text(json.dumps({**tiny_config(), **changes}))

    return build


def linked(folder: Path) -> None:
    path = write_adapter(folder) / ADAPTER
    path.rename(folder.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def bad_value(name: str, value: float, kind: str = "F32") -> Build:
    def change(found: Tensors) -> Tensors:
        values = found[name][1].copy()
        values.reshape(-1)[-1] = value
        if kind == "BF16":
            return {**found, name: ("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))}
        return {**found, name: ("F32", values)}

    return tensors(change)


def renamed(old: str, new: str) -> Build:
    return tensors(lambda found: {name.replace(old, new): value for name, value in found.items()})


def more(name: str, *shape: int) -> Build:
    return tensors(lambda found: {**found, name: ("F32", np.ones(shape, np.float32))})


def shaped(name: str, *shape: int) -> Build:
    return tensors(lambda found: {**found, name: ("F32", np.ones(shape, np.float32))})


def huge_sum(folder: Path) -> None:
    found = factors(Q)
    write_adapter(folder, {"lora_alpha": 1e9}, {n: (k, 1e16 * np.ones_like(v)) for n, (k, v) in found.items()})


A, B = (f"{PREFIX}{Q}.lora_{side}.weight" for side in "AB")

REFUSED: list[tuple[str, Build, str, list[str], str]] = [
    ("40 bytes", weights_are(b"\0" * 40), "header_broken", [ADAPTER, "40"], "save"),
    ("no tensors", tensors(lambda t: {}), "no_tensors", [ADAPTER], "save"),
    ("cut off", cut_off, "shard_truncated", [ADAPTER], "after the save has ended"),
    ("eight bits", of_eight_bits, "dtype_unsupported", [ADAPTER, "I8"], "bfloat16"),
    ("a link", linked, "symlink", [ADAPTER], "real files"),
    ("config alone", only(CONFIG), "adapter_incomplete", [ADAPTER, "missing"], "save_pretrained"),
    ("pickle", only(CONFIG, also=("adapter_model.bin",)), "pickle", ["adapter_model.bin"], "safe_serialization=True"),
    ("beside full weights", beside_weights, "adapter_beside_model", [SINGLE, "which one is meant"], "alone"),
    ("pickle beside full weights", pickle_beside_weights, "adapter_beside_model", ["adapter_model.bin", SINGLE], "alone"),
    ("config not JSON", config_text("{"), "not_json", [CONFIG], "save"),
    ("config of another model", with_config_of(num_hidden_layers=3), "config_differs", ["num_hidden_layers"], "weights"),
    ("code", config(auto_map={"AutoModel": "evil.Evil"}), "auto_map", [CONFIG, "auto_map"], "no code"),
    ("code in a file", config(base_model_name_or_path="../evil.py"), "auto_map", [CONFIG], "no code"),
    ("no type", config_text("{}"), "adapter_unsupported", ["peft_type", "None"], MERGE),
    ("LoHa", config(peft_type="LOHA"), "adapter_unsupported", ["peft_type", "LOHA"], MERGE),
    ("DoRA", config(use_dora=True), "adapter_unsupported", ["use_dora"], MERGE),
    ("biases", config(bias="all"), "adapter_unsupported", ["field bias", "all"], MERGE),
    ("transposed", config(fan_in_fan_out=True), "adapter_unsupported", ["fan_in_fan_out"], MERGE),
    ("modules to save", config(modules_to_save=["lm_head"]), "adapter_unsupported", ["modules_to_save"], MERGE),
    ("tokens", config(trainable_token_indices=[1, 2]), "adapter_unsupported", ["trainable_token_indices"], MERGE),
    ("of the future", config(use_better_lora={"a": 1}), "adapter_unsupported", ["use_better_lora"], MERGE),
    *[(f"start {start}", config(init_lora_weights=start), "adapter_unsupported", ["init_lora_weights"], MERGE)
      for start in ("pissa", "mica", {"a": 1}, 7)],
    *[(f"r {r!r:.20}", config(r=r), "adapter_config", ["field r is", "1024"], MERGE)
      for r in (0, True, None, 1.5, "8", 10**400, math.nan)],
    *[(f"alpha {alpha!r:.20}", config(lora_alpha=alpha), "adapter_config", ["field lora_alpha is"], MERGE)
      for alpha in (math.nan, math.inf, "16", None, True, 10**400)],
    ("ranks by layer", config(rank_pattern={"q_proj": 4}), "adapter_unsupported", ["rank_pattern"], MERGE),
    ("scales by layer", config(alpha_pattern={"(": 4}), "adapter_unsupported", ["alpha_pattern"], MERGE),
    ("not a target", config(target_modules=["q_proj"]), "adapter_names", [UP, "target_modules"], MERGE),
    ("another rank", config(r=8), "adapter_shapes", [A, "[4, 64]", "[8, 64]"], "save it with peft"),
    ("A of another model", shaped(A, 4, 128), "adapter_shapes", [A, "[4, 128]"], "base model of this run"),
    ("B of another model", shaped(B, 128, 4), "adapter_shapes", [B, "[128, 4]"], "base model of this run"),
    ("B empty, as an ungathered shard", shaped(B, 0), "adapter_shapes", [B, "[0]"], "save it with peft"),
    ("A alone", tensors(lambda t: {n: v for n, v in t.items() if n != B}), "adapter_names", ["lora_A and no lora_B"], MERGE),
    ("no such layer", renamed("layers.1.", "layers.7."), "adapter_names", ["layers.7.mlp.up_proj"], MERGE),
    ("the embedding", renamed(UP, EMBEDDING.removesuffix(".weight")), "adapter_names", ["embed_tokens"], MERGE),
    ("the tied head", renamed(UP, "lm_head"), "adapter_names", ["lm_head.weight", "tied"], MERGE),
    ("without prefix", renamed(PREFIX, ""), "adapter_names", [f"'{Q}.lora_A.weight'"], MERGE),
    ("with the adapter's name", renamed(".weight", ".default.weight"), "adapter_names", ["lora_A.default"], MERGE),
    ("whole embedding", more(f"{PREFIX}{EMBEDDING}", 400, 64), "adapter_names", [EMBEDDING], "save_embedding_layers=False"),
    ("a name of 4,000 characters", more("x" * 4000, 1), "adapter_names", ["xxx"], MERGE),
    ("NaN in A", bad_value(A, math.nan), "not_finite", [A], "earlier"),
    ("a sum beyond fp32", huge_sum, "not_finite", [f"{Q}.weight", "added"], "earlier"),
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
    assert answer["fault"] == "artifact" and answer["adapter"] is None
    assert len(answer["error"]) < 1000


def test_layers_that_are_stored_transposed_are_not_merged(tmp_path: Path) -> None:
    """A square one would fit either way round."""
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    (base / "config.json").write_text(json.dumps({**tiny_config(), "model_type": "gpt2"}))
    desk = Desk(tmp_path / "world", read_base(base))
    write_adapter(desk.checkpoint)
    answer = desk.refused()
    assert answer["code"] == "adapter_unsupported" and "gpt2" in answer["error"]

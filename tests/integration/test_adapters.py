"""LoRA adapters through the real intake: merged as peft merges them, onto the staged base model and no other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ADAPTER, Q, factors, lay_base, merged_by_peft, read_base, train_adapter, write_adapter
from checkpoints import SINGLE, TINY, Desk, changed, meanwhile, save, tiny_tensors, write_at

from autorl_hpc.errors import Refused
from autorl_hpc.files import artifacts
from autorl_hpc.files.checkpoint import folder_content_hash, weight_files
from autorl_hpc.supervise.copy import copy_checkpoint
from autorl_hpc.supervise.intake import lint_folder

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("all linear layers, bf16", {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}, 14, "bfloat16", "float32"),
    ("adapter in fp16", {"r": 8, "target_modules": ALL}, 14, "bfloat16", "float16"),
    ("rank above the width", {"r": 100, "target_modules": ["down_proj"]}, 2, "float16", "float32"),
    ("rslora", {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL}, 14, "bfloat16", "float32"),
    ("alpha below zero", {"r": 4, "lora_alpha": -7, "target_modules": ["o_proj"]}, 2, "float32", "float32"),
    ("target by a pattern", {"r": 4, "target_modules": r"model\.layers\.\d+\.(self_attn\.[qk]_proj|mlp\.up_proj)"}, 6, "float32", "float32"),
    ("one layer of two", {"r": 4, "target_modules": ALL, "layers_to_transform": [1]}, 7, "bfloat16", "float32"),
    ("some left out", {"r": 4, "target_modules": ALL, "exclude_modules": ["up_proj"]}, 12, "float16", "float32"),
]  # fmt: skip
"""Name, peft's settings, changed tensors, and what base model and adapter are stored in."""


def values_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for name in weight_files(path):
        found.update(load_file(path / name))
    return found


def compare(base: Path, ours: Path, adapter: Path, count: int) -> None:
    """Bit by bit for bf16 and fp16 but for one unit in the last place; fp32 but for the order of summation."""
    import torch

    theirs, mine, before = merged_by_peft(base, adapter), values_of(ours), values_of(base)
    assert set(mine) == set(before)
    other = {name for name in mine if not torch.equal(mine[name], before[name])}
    assert len(other) == count
    for name, value in mine.items():
        expected = theirs[name]
        assert value.dtype == expected.dtype == before[name].dtype
        if name not in other:
            assert torch.equal(value, expected)
        elif value.dtype is torch.float32:
            scale = before[name].abs() + (expected - before[name]).abs()
            assert bool(((value - expected).abs() <= 1e-6 * scale + 1e-9).all()), name
        else:
            ulp = torch.nextafter(expected.abs(), torch.full_like(expected, torch.inf)).float() - expected.abs().float()
            distance = (value.float() - expected.float()).abs()
            assert bool((distance <= ulp).all()), name
            assert float((distance == 0).float().mean()) > 0.999, f"{name}: rounding is not to nearest even"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Base models of one dtype each, laid once."""
    root = tmp_path_factory.mktemp("bases")

    def get(dtype: str, **options: Any) -> Path:
        folder = root / "-".join([dtype, *(f"{k}{v}" for k, v in options.items())])
        if not folder.exists():
            lay_base(folder, dtype, **options)
        return folder

    return get


@pytest.mark.parametrize(
    ("config", "count", "dtype", "stored"), [row[1:] for row in CONFIGS], ids=[row[0] for row in CONFIGS]
)
def test_an_adapter_is_merged_as_peft_merges_it(
    tmp_path: Path, bases: Callable[..., Path], config: dict[str, Any], count: int, dtype: str, stored: str
) -> None:
    base = bases(dtype)
    desk = Desk(tmp_path, read_base(base))
    train_adapter(base, desk.checkpoint, stored, **config)
    assert {str(v.dtype) for v in values_of(desk.checkpoint).values()} == {f"torch.{stored}"}
    answer = desk.accepted()
    artifact = desk.artifact(answer)
    assert folder_content_hash(artifact) == answer["content_hash"] != desk.base.content_hash
    assert set(os.listdir(artifact)) == {SINGLE, artifacts.READY_NAME, "refs"}
    assert answer["adapter"] == {"rank": config["r"], "tensors": count}
    (kept,) = desk.view().accepted()
    assert kept.adapter is not None and kept.adapter.model_dump() == answer["adapter"]
    assert kept.tensors == len(desk.base.shapes) and not kept.is_base
    compare(base, artifact, desk.checkpoint, count)


def test_a_head_of_its_own_and_shards(tmp_path: Path, bases: Callable[..., Path]) -> None:
    base = bases("bfloat16", untied=True, shards="100KB")
    desk = Desk(tmp_path, read_base(base))
    train_adapter(base, desk.checkpoint, embeddings=False, r=8, target_modules=[*ALL, "lm_head"])
    artifact = desk.artifact(desk.accepted())
    assert weight_files(artifact) == weight_files(base) and len(weight_files(base)) > 1
    compare(base, artifact, desk.checkpoint, 15)


def test_the_sum_is_the_content_whatever_lies_beside_it_and_however_it_comes(tmp_path: Path) -> None:
    """What is kept of an adapter is an ordinary checkpoint."""
    desk = Desk(tmp_path)
    write_adapter(desk.checkpoint)
    first = desk.accepted()
    second, merged = write_adapter(desk.workspace / "output" / "v2"), desk.workspace / "output" / "merged"
    for name in ("README.md", "optimizer.pt", "training_args.bin", "tokenizer.json", "config.json"):
        (second / name).write_text("x")
    shutil.copyfile(TINY / "config.json", second / "config.json")
    answer = desk.submit("v2", "output/v2")
    assert (answer["status"], answer["same_as"]) == ("accepted", 1)
    assert answer["content_hash"] == first["content_hash"] and len(answer["ignored_files"]) == 4
    merged.mkdir()
    shutil.copyfile(desk.artifact(first) / SINGLE, merged / SINGLE)
    shutil.copyfile(TINY / "config.json", merged / "config.json")
    answer = desk.submit("merged", "output/merged")
    assert (answer["status"], answer["same_as"], answer["adapter"]) == ("accepted", 1, None)


def test_no_other_base_is_ever_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would load `base_model_name_or_path` relative to the working directory."""
    plain = Desk(tmp_path / "plain")
    write_adapter(plain.checkpoint)
    expected = plain.accepted()["content_hash"]
    desk = Desk(tmp_path / "world")
    decoy = save(desk.workspace / "autorl" / "tiny", changed(tiny_tensors(), 1.0))
    (desk.workspace / "evil_library.py").write_text("open('LIBRARY-WAS-IMPORTED', 'w')")
    monkeypatch.chdir(desk.workspace)
    monkeypatch.syspath_prepend(str(desk.workspace))
    names = [
        "autorl/tiny",
        str(decoy),
        "../../secret",
        "/etc",
        "https://example.com/model",
        "x" * 10_000,
        None,
        7,
        ["a"],
    ]
    for number, name in enumerate(names):
        mapping = {"base_model_class": "Evil", "parent_library": "evil_library"}
        config = {"base_model_name_or_path": name, "revision": "../x", "auto_mapping": mapping}
        write_adapter(desk.workspace / "output" / f"v{number}", config)
        answer = desk.submit(f"v{number}", f"output/v{number}")
        if number < 2:  # a folder of the agent's own, which transformers would take for the base
            assert (answer["status"], answer["code"]) == ("refused", "adapter_base"), answer
        else:
            assert (answer["status"], answer["content_hash"]) == ("accepted", expected), answer
    assert not (desk.workspace / "LIBRARY-WAS-IMPORTED").exists()


def test_an_untrained_adapter_is_the_base_model(tmp_path: Path) -> None:
    """Also where the base holds a negative zero, to which nothing must be added."""
    tensors = tiny_tensors()
    tensors[f"{Q}.weight"][1][0, :5] = -0.0
    save(tmp_path / "base", tensors)
    desk = Desk(tmp_path / "world", read_base(tmp_path / "base"))
    untrained = {n: (k, v if "lora_A" in n else np.zeros_like(v)) for n, (k, v) in factors(Q).items()}
    write_adapter(desk.checkpoint, tensors=untrained)
    answer = desk.accepted()
    assert answer["is_base_model"] is True and answer["content_hash"] == desk.base.content_hash


@pytest.mark.parametrize("how", ["rewritten", "cut"])
def test_an_adapter_that_changes_while_it_is_merged_is_refused(tmp_path: Path, how: str) -> None:
    desk = Desk(tmp_path)
    path = write_adapter(desk.checkpoint) / ADAPTER
    with ExitStack() as stack:
        fd = os.open(desk.checkpoint, os.O_RDONLY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, desk.base, stack)
        disturbed = meanwhile(lambda: os.truncate(path, 600) if how == "cut" else write_at(path, 600, b"\0" * 4))
        with disturbed, pytest.raises(Refused) as caught:
            copy_checkpoint(linted, desk.base, tmp_path, "float32")
    assert caught.value.code == "artifact_changed" and ADAPTER in caught.value.message


def test_a_changed_base_model_is_not_merged_onto(tmp_path: Path) -> None:
    """The pinned content hash covers what is read: a bit flipped after staging is found in the same pass."""
    save(tmp_path / "base", tiny_tensors())
    desk = Desk(tmp_path / "world", read_base(tmp_path / "base"))
    with open(tmp_path / "base" / SINGLE, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\1")
    write_adapter(desk.checkpoint)
    answer = desk.refused()
    assert (answer["code"], answer["fault"]) == ("base_changed", "cluster")

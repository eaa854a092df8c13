"""A base whose config ties head and embedding, and whose file holds the head all the same: it counts for nothing, everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import EMBEDDING, HEAD, TINY, changed, refusal, save, take, tiny_config, tiny_tensors
from weights import Tensors, write_safetensors

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.checkpoint import (
    TIED_BY_DEFAULT,
    base_content_hash,
    config_ties,
    folder_content_hash,
    own_tensors,
)
from autorl_hpc.files.layout import Root
from autorl_hpc.grading.fingerprint import FolderWeights, compare
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.stage.models import stage_model
from autorl_hpc.supervise.lint import BaseModel

FEW = Sampling(max_new_tokens=8)


def lay(folder: Path, tensors: Tensors, **config: object) -> Path:
    """The tiny model's folder with other tensors and fields of its config."""
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**tiny_config(), **config}))
    return folder


def with_head(tensors: Tensors, scale: float = 1.0) -> Tensors:
    kind, values = tensors[EMBEDDING]
    return {HEAD: (kind, (values * scale).astype(values.dtype)), **tensors}


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    """Staged as a published model is that holds both."""
    source = lay(tmp_path / "source", with_head(tiny_tensors()))
    root = Root(tmp_path / "root")
    content = stage_model(root, "some/model", source).content_hash
    assert content is not None
    return BaseModel.read(root.model("some/model"), content)


def test_a_base_with_two_that_differ_is_refused(tmp_path: Path) -> None:
    source = lay(tmp_path / "source", with_head(tiny_tensors(), 1.5))
    with pytest.raises(AutorlError, match="tie_word_embeddings") as told:
        stage_model(Root(tmp_path / "root"), "some/model", source)
    assert "config.json" in str(told.value.next_step)
    untied = lay(tmp_path / "untied", with_head(tiny_tensors(), 1.5), tie_word_embeddings=False)
    stage_model(Root(tmp_path / "root"), "some/model", untied)
    assert not own_tensors(untied)[1] and base_content_hash(untied) == folder_content_hash(untied)


def test_submissions_with_and_without_the_head_have_one_hash_and_one_answer(base: BaseModel, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from autorl_hpc.grading.engines.transformers import TransformersEngine

    assert base.folder is not None
    tensors = changed(tiny_tensors(), 0.05)
    taken = {}
    for name, given in {"without": tensors, "with": with_head(tensors)}.items():
        taken[name] = take(save(tmp_path / name, given), tmp_path / f"copy-{name}", base)
    assert taken["with"].content_hash == taken["without"].content_hash
    assert taken["with"].not_in_hash == (HEAD,)
    engine = TransformersEngine(
        base.folder, GraderSpec(device="cpu", threads=1, batch_tokens=4096, cache_gib=0.0), "float32"
    )
    prompts = [engine.encode("2 plus 3 is"), engine.encode("one two")]
    answers = []
    for folder in (base.folder, tmp_path / "copy-with", base.folder, tmp_path / "copy-without"):
        engine.load(folder, base.content_hash if folder == base.folder else taken["with"].content_hash)
        answers.append(engine.generate(prompts, FEW, 0))
    assert answers[0] == answers[2] != answers[1] == answers[3]
    engine.close()
    new, own = FolderWeights(tmp_path / "copy-with"), FolderWeights(base.folder, own_tensors(base.folder)[1])
    compare(new, own, taken["with"].content_hash, base.content_hash)  # raises where the hash is not that


@pytest.mark.parametrize("kind", ["values", "dtype"])
def test_a_head_that_is_not_the_embedding_is_refused_with_advice(base: BaseModel, tmp_path: Path, kind: str) -> None:
    tensors = changed(tiny_tensors())
    if kind == "values":
        given = with_head(tensors, 1.5)
    else:  # the same bytes, read as other numbers
        halves = ("F16", tensors[EMBEDDING][1].astype(np.float16))
        given = {**tensors, EMBEDDING: halves, HEAD: ("BF16", halves[1].view(np.uint16))}
    refused = refusal(save(tmp_path / "a", given), tmp_path / "copy", base)
    assert refused.code == "untied_head" and "tie_word_embeddings" in refused.advice and HEAD in refused.advice


def test_configs_are_understood_as_transformers_does() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    known: tuple[str, ...] = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "olmo2", "phi3", "granite")
    known += ("gpt2", "gemma2", "gemma3_text", "smollm3", "opt", "falcon", "starcoder2", "cohere2")
    for name in known:
        assert config_ties({"model_type": name}) == mapping[name].tie_word_embeddings, name
        for said in (True, False):
            assert config_ties({"model_type": name, "tie_word_embeddings": said}) is said
    assert config_ties({"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}}) is False
    assert {"gpt2", "smollm3"} <= TIED_BY_DEFAULT

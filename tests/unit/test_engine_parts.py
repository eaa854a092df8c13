"""Parts of engines by themselves: the shelf of checkpoints, GPUs by their names, the worker's environment, texts."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import EMBEDDING, HEAD, TINY
from weights import noisy_tiny, read_safetensors, write_safetensors

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.grading.engines import vllm, weights_cache, worker_process
from autorl_hpc.grading.engines.transformers import BaseTokenizer, TransformersEngine, dated
from autorl_hpc.grading.engines.weights_cache import read_checkpoint
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import WeightsChanged

TIED = frozenset({HEAD})
FEW = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("made")
    for seed in range(3):
        noisy_tiny(TINY, folder / str(seed), seed=seed)
    return [(folder / str(seed), folder_content_hash(folder / str(seed))) for seed in range(3)]


@pytest.mark.parametrize("read_bytes", [weights_cache.READ_BYTES, 1000])
def test_what_was_hashed_is_what_is_kept(
    made: list[tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(weights_cache, "READ_BYTES", read_bytes)
    folder = tmp_path / "shards"
    folder.mkdir()
    tensors = read_safetensors(made[0][0] / "model.safetensors")
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        write_safetensors(folder / f"model-{number}.safetensors", {name: tensors[name] for name in part})
    found = read_checkpoint(folder, made[0][1], TIED)
    assert {t.name: bytes(t.data) for t in found.tensors} == {n: v.tobytes() for n, (_, v) in tensors.items()}
    assert found.size == sum(values.nbytes for _, values in tensors.values())
    with_head = {**tensors, HEAD: tensors[EMBEDDING]}
    write_safetensors(folder / "model-0.safetensors", {name: with_head[name] for name in (*names[:5], HEAD)})
    read_checkpoint(folder, made[0][1], TIED)
    with pytest.raises(WeightsChanged):
        read_checkpoint(folder, made[0][1], frozenset())
    other = ("F32", np.array(tensors[EMBEDDING][1]) + 1)
    write_safetensors(folder / "model-0.safetensors", {**{name: tensors[name] for name in names[:5]}, HEAD: other})
    with pytest.raises(WeightsChanged):
        read_checkpoint(folder, made[0][1], TIED)
    (folder / "model-0.safetensors").write_bytes(b"no safetensors file")
    with pytest.raises(WeightsChanged):
        read_checkpoint(folder, made[0][1], TIED)


def test_gpus_by_all_their_names() -> None:
    def seen(value: str | None) -> list[str]:
        return vllm.visible({} if value is None else {vllm.VARIABLE: value}, lambda: 3)

    assert seen(None) == ["0", "1", "2"]
    assert seen("2, 0") == ["2", "0"]
    assert seen("") == seen("NoDevFiles") == seen("-1") == []
    assert seen("1,-1,2") == ["1"], "as CUDA: what follows an entry that is none is not seen"
    assert seen("GPU-5a,MIG-9e,GPU-5a") == ["GPU-5a", "MIG-9e"]
    assert vllm.shares(["0", "1", "2"], 1) == [["0"], ["1"], ["2"]]
    assert vllm.shares(["0", "1", "2", "3", "4"], 2) == [["0", "1"], ["2", "3"]]
    with pytest.raises(AutorlError, match="needs 2"):
        vllm.shares(["0"], 2)
    with pytest.raises(AutorlError, match="MIG"):
        vllm.shares(["MIG-1", "MIG-2"], 2)
    order = {vllm.ORDER_VARIABLE: "PCI_BUS_ID"}
    assert vllm.environment(["3", "1"]) == {vllm.VARIABLE: "3,1"}
    assert vllm.environment([]) == {vllm.VARIABLE: ""}
    assert vllm.environment(["GPU-b"], {"GPU-b": 1}.get) == {vllm.VARIABLE: "1", **order}
    assert vllm.environment(["GPU-b"], lambda entry: None) == {vllm.VARIABLE: "GPU-b"}
    assert vllm.environment(["MIG-b"], lambda entry: 0) == {vllm.VARIABLE: "MIG-b"}


def test_a_workers_environment_is_offline_and_alone(tmp_path: Path) -> None:
    outer = {"PYTHONPATH": "/a:/b", "VLLM_PORT": "5000", "MASTER_PORT": "5000", "RANK": "1", "HF_HUB_OFFLINE": "0"}
    secret = {"HF_TOKEN": "x", "OPENAI_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "x"}
    outer |= {
        **secret,
        "VLLM_PLUGINS": "theirs",
        "PATH": "/bin",
        worker_process.CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    env = worker_process.environment(outer, {"CUDA_VISIBLE_DEVICES": "1"}, 2)
    assert not {"VLLM_PORT", "MASTER_PORT", "RANK"} & set(env)
    code, *rest = env["PYTHONPATH"].split(":")
    assert rest == ["/a", "/b"] and env["PATH"] == "/bin"
    assert os.listdir(code) == ["autorl_hpc"], "nothing else of ours comes before the other Python's own"
    assert (Path(code) / "autorl_hpc").samefile(worker_process.HOME / "autorl_hpc")
    assert stat.S_IMODE(os.stat(code).st_mode) == 0o700
    assert not set(secret) & set(env)
    assert (env["HF_HUB_OFFLINE"], env["DO_NOT_TRACK"], env["VLLM_PLUGINS"]) == ("1", "1", "")
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) == ("1", "2")
    beside = worker_process.beside_gpus({"OMP_NUM_THREADS": "1"}, 16)
    assert beside == {"OMP_NUM_THREADS": "4", worker_process.COMPILERS: "16"}
    assert worker_process.beside_gpus({worker_process.COMPILERS: "3"}, 0) == {"OMP_NUM_THREADS": "1"}
    cache = Path(env["VLLM_CACHE_ROOT"]).parent
    assert cache == tmp_path / "cache" and stat.S_IMODE(os.stat(cache).st_mode) == 0o700


def tokenizer_with(folder: Path, template: str | None = None, **config: Any) -> BaseTokenizer:
    """The tiny model's tokenizer with another template and config."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "*.safetensors"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return BaseTokenizer(folder)


DATED = "{%- if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day + '|' + strftime_now('%B %-d, %A') }}"


@pytest.mark.slow
def test_a_template_s_date_is_the_recipe_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each day asks other prompts, and a rescore on another day accuses an honest run."""
    from transformers.utils import chat_template_utils

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2031, 2, 3)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    words = tokenizer_with(tmp_path / "a", DATED)
    talk = [{"role": "user", "content": "x"}]
    assert words.tokenizer.apply_chat_template(talk, tokenize=False) == "03 Feb 2031|February 3, Monday"
    assert words.tokenizer.decode(words.chat(talk)) == "01 Jan 2026|January 1, Thursday"
    other = BaseTokenizer(tmp_path / "a", datetime.date(2025, 12, 24))
    assert other.tokenizer.decode(other.chat(talk)) == "24 Dec 2025|December 24, Wednesday"
    assert dated(" \n{% if x %}", datetime.date(2025, 1, 1)) == " \n{% if x %}", "others stay as they are"


@pytest.mark.slow
def test_plain_prompts_begin_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """Gemma and Llama see a first token before every text of their training; chats bring it in their template."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    first = tokenizer_with(tmp_path / "a", template, bos_token="<|pad|>").tokenizer.bos_token_id
    path = tmp_path / "a" / "tokenizer.json"
    marks = {name: {"SpecialToken": {"id": name, "type_id": 0}} for name in ("<|pad|>", "<|endoftext|>")}
    ids = {
        name: {"id": name, "ids": [number], "tokens": [name]} for name, number in zip(marks, (first, 0), strict=True)
    }
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [marks["<|pad|>"], text, marks["<|endoftext|>"]]
    adds = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": adds}))
    words = BaseTokenizer(tmp_path / "a")
    asked = words.encode("Question: 1\nAnswer:")
    assert [*asked, 0] == words.tokenizer("Question: 1\nAnswer:").input_ids and asked[0] == first
    assert words.encode("<|pad|>Question") == words.encode("Question"), "never twice"
    assert words.chat([{"role": "user", "content": "Question"}]) == words.encode("Question")
    plain = BaseTokenizer(TINY)
    assert plain.encode("Question") == plain.tokenizer("Question", add_special_tokens=False).input_ids


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if 'thinking' in m and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NO_NAME = HARMONY.replace("thinking", "reasoning_content").replace("<|channel|>final<|message|>", "<|channel|>")


ENDINGS = {
    "chatml": (CHATML, {"<|im_end|>"}),
    "last turn open": (
        CHATML.replace("<|im_end|>\n{% endfor %}", "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}"),
        {"<|im_end|>"},
    ),
    "last turn ends otherwise": (
        CHATML.replace("<|im_end|>\n", "{{ '<|eot|>' if loop.last else '<|im_end|>' }}\n"),
        {"<|im_end|>", "<|eot|>"},
    ),
    "assistant's ends otherwise": (
        CHATML.replace("<|im_end|>\n", "{{ '<|eot|>' if m['role'] == 'assistant' else '<|im_end|>' }}\n"),
        {"<|im_end|>", "<|eot|>"},
    ),
    "system's ends otherwise": (
        CHATML.replace("<|im_end|>\n", "{{ '<|eot|>' if m['role'] == 'system' else '<|im_end|>' }}\n"),
        {"<|im_end|>", "<|eot|>"},
    ),
    "no conversation without a system turn": (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        {"<|im_end|>"},
    ),
    "system turn refused": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        {"<|im_end|>"},
    ),
    "system turn dropped": (
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] != 'system' else '' }}"),
        {"<|im_end|>"},
    ),
    "words and a thought before the answer": (
        "{% for m in messages %}{{ m['role'] }}: {{ '<|eot|>' if m['role'] == 'assistant' }}{{ m['content'] }}"
        "{{ '<|im_end|>' if m['role'] == 'assistant' }}\n{% endfor %}",
        {"<|im_end|>"},
    ),
    "refuses everything": ("{{ raise_exception('no') }}", set()),
    "ends nothing": ("{% for m in messages %}{{ m['content'] }}{% endfor %}", set()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_a_turn_ends_at_every_token_by_which_the_template_ends_one(tmp_path: Path, name: str) -> None:
    """Else the next turns that a model writes by itself are scored as a part of its answer."""
    template, wanted = ENDINGS[name]
    marks = ["<|im_start|>", "<|im_end|>", "<|eot|>"]
    words = tokenizer_with(tmp_path / "a", template, extra_special_tokens=marks)
    ids = {mark: words.tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    assert {mark for mark in marks if ids[mark] in words.ends} == wanted
    for mark in wanted:
        assert "5" not in words.answer([*words.encode("#### 4"), ids[mark], *words.encode("no #### 5")], FEW).text


THINKS = "<|channel|>analysis<|message|>4?"
AGAIN, FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
CHANNELS = [
    (HARMONY, f"{THINKS}{AGAIN}{FINAL}#### 5<|return|>#### 6", "#### 5"),
    (HARMONY, f"{FINAL}#### 5<|return|><|start|>user<|message|>#### 6", "#### 5"),
    *[(HARMONY, f"{FINAL}4{AGAIN}{FINAL}5", "5"), (HARMONY, f"{THINKS}{AGAIN}{THINKS}", ""), (HARMONY, THINKS, "")],
    *[(HARMONY, "5<|return|>6", "5"), (CHATML, "<|channel|>5<|end|><|im_end|>6", "5")],
    (NO_NAME, f"{THINKS}{AGAIN}<|channel|>5<|return|>6", "5"),
]


@pytest.mark.slow
@pytest.mark.parametrize("template", [HARMONY, NO_NAME, CHATML], ids=["harmony", "no name", "chatml"])
def test_the_end_of_a_channel_is_not_the_end_of_the_turn(tmp_path: Path, template: str) -> None:
    """Else what gpt-oss thinks is scored, and what it answers is not."""
    marks = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "return", "im_start", "im_end")]
    words = tokenizer_with(tmp_path / "a", template, extra_special_tokens=marks)
    for _, said, text in (row for row in CHANNELS if row[0] == template):
        assert words.answer(words.tokenizer(said, add_special_tokens=False).input_ids, FEW).text == text, said


@pytest.mark.slow
def test_answers_are_cut_at_the_first_end() -> None:
    words = BaseTokenizer(TINY)
    tokens = words.encode("one two three two")
    end = words.ends[0]
    whole = words.answer(tokens, FEW)
    assert (whole.text, whole.tokens, whole.truncated) == ("one two three two", len(tokens), True)
    ended = words.answer([*tokens[:2], end, *tokens], FEW)
    assert (ended.tokens, ended.truncated) == (2, False) and "one two three two".startswith(ended.text)
    stopped = words.answer(tokens, FEW.model_copy(update={"stop": ("three", "two")}))
    assert (stopped.text, stopped.truncated) == ("one ", False)
    assert words.answer([], FEW) == ("", 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_logits", [True, False])
def test_log_likelihoods_are_what_plain_transformers_computes(keeps_logits: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = TransformersEngine(TINY, GraderSpec(device="cpu", threads=1, batch_tokens=600, cache_gib=0.1), "float32")
    engine.load(TINY, folder_content_hash(TINY))
    engine._keeps_logits &= keeps_logits
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    window = engine.context_tokens
    assert window == plain.config.max_position_embeddings
    draw = np.random.default_rng(0)
    sizes = [(1, 1), (3, 5), (40, 2), (7, 90), (window, 2), (window - 1, 1), (1, window - 1), *[(12, 3)] * 30]
    pairs = [tuple(draw.integers(5, len(engine._words.tokenizer), n).tolist() for n in size) for size in sizes]
    ask = engine.encode("12+3=")
    answer = plain.generate(torch.tensor([ask]), max_new_tokens=3, do_sample=False)[0, len(ask) :].tolist()
    found = engine.loglikelihood([*pairs, (ask, answer)])
    assert found[-1].is_greedy and not any(score.is_greedy for score in found[1:7])
    for (context, continuation), score in zip(pairs, found, strict=False):
        ids = torch.tensor([[*context, *continuation][-window:]])
        with torch.no_grad():
            chances = plain(ids).logits[0].log_softmax(-1)[-len(continuation) - 1 : -1]
        wanted = chances[range(len(continuation)), continuation]
        assert score.logprob == pytest.approx(wanted.sum().item(), rel=1e-5, abs=1e-4)
        assert score.is_greedy == (chances.argmax(-1).tolist() == continuation)

"""The scripted experts on several processes of real GPUs: under DeepSpeed's ZeRO-2 and ZeRO-3, and with an engine of vLLM's in each process.
They learn from mixed rewards, and save a checkpoint that intake accepts. Skips by name what a machine lacks.

`AUTORL_TEST_BASE=FOLDER pytest tests/gpu/test_experts_gpu.py -s` takes a larger base model than the shipped toy, which trains in
bfloat16, and which vLLM can sample from; it must be a Llama. All GPUs that `CUDA_VISIBLE_DEVICES` names are used.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import shutil
from pathlib import Path

import needs
import pytest
from checkpoints import take
from experts import GAME, Workplace

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.sandbox.prove import cuda_works
from autorl_hpc.supervise.lint import BaseModel

pytestmark = needs.needs("gpu", cuda_works(), "no GPU here")
zero = needs.needs("zero", importlib.util.find_spec("deepspeed") is not None, "deepspeed is not installed")
by_vllm = needs.needs(
    "vllm",
    bool(os.environ.get("AUTORL_TEST_BASE")) and importlib.util.find_spec("vllm") is not None,
    "no vLLM, or no base model",
)

MIXED = GAME.replace(
    '"1" in action', "sum(map(ord, action)) % 2"
)  # whatever a model samples, half of its answers are good


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    made = Workplace(tmp_path, "alfworld-mini", "sft-grpo-online", left_s=(400.0,))
    base = os.environ.get("AUTORL_TEST_BASE")
    if base:
        shutil.rmtree(made.model)
        shutil.copytree(base, made.model)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONPATH"):
        if name in os.environ:
            made.env[name] = (
                os.pathsep.join([made.env[name], os.environ[name]]) if name in made.env else os.environ[name]
            )
    made.env.setdefault("CUDA_VISIBLE_DEVICES", "0")
    made.env["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    (made.path / "environment" / "environment.py").write_text(MIXED)
    meta = json.loads((made.path / "run_meta.json").read_text())
    meta["recipe"]["max_new_tokens"] = 8
    (made.path / "run_meta.json").write_text(json.dumps(meta))
    rows = [{"goal": "g", "reward": 1.0, "ids": [5 + n, 6, 7, 8, 9 + n], "own": [0, 0, 1, 0, 1]} for n in range(24)]
    (made.path / "output" / "traces").mkdir(parents=True)
    with gzip.open(made.path / "output" / "traces" / "000024.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return made


@pytest.mark.parametrize(
    "config",
    [pytest.param("zero2", marks=zero), pytest.param("zero3", marks=zero), pytest.param("multi-gpu", marks=by_vllm)],
)
@pytest.mark.timeout(600)
def test_several_processes_learn_and_save_a_checkpoint_that_is_accepted(
    place: Workplace, tmp_path: Path, config: str
) -> None:
    vllm = config == "multi-gpu"
    told = place.bash(
        'launch "$MODEL_PATH" train_episodes.py --out output/sft --traces output/traces --steps 3\n'
        "launch output/sft train_online.py --out output/online --iterations 2 --games 8 --copies 4 --validation 8\n",
        EXPERT_ACCELERATE=config,
        EXPERT_VLLM=str(int(vllm)),
        EXPERT_SAMPLER="vllm" if vllm else "",
    )
    print(told[-3000:])
    assert ("vLLM is up" if vllm else "DEEPSPEED") in told
    steps = [ast.literal_eval(line) for line in told.splitlines() if "'mixed_groups'" in line]
    assert len(steps) == 2 and all(step["mixed_groups"] > 0 and step["grad_norm"] > 0 for step in steps), steps
    base = BaseModel.read(place.model, folder_content_hash(place.model))
    for name in ("sft", "online"):
        take(place.path / "output" / name, tmp_path / "taken" / name, base, "bfloat16")

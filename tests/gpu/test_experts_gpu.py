"""The scripted experts under DeepSpeed's ZeRO-2 and ZeRO-3 on real GPUs: a whole checkpoint that intake accepts. Skips by name
where there is no GPU or no deepspeed.

`AUTORL_TEST_BASE=FOLDER pytest tests/gpu/test_experts_gpu.py -s` takes a larger base model than the shipped toy, which trains in
bfloat16; it must be a Llama. All GPUs that `CUDA_VISIBLE_DEVICES` names are used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import needs
import pytest
from checkpoints import take
from experts import Workplace

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.sandbox.prove import cuda_works
from autorl_hpc.supervise.lint import BaseModel

pytestmark = [
    needs.needs("gpu", cuda_works(), "no GPU here"),
    needs.needs("zero", importlib.util.find_spec("deepspeed") is not None, "deepspeed is not installed"),
]

BETTER = """
import train_online
class Run(train_online.Run):
    def validate(self):
        super().validate()
        return float(self.iteration)
train_online.Run = Run
train_online.main()
"""
"""The trainer itself; what it has is saved at its end, better or not."""


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
    made.env |= {"EXPERT_VLLM": "0", "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    return made


@pytest.mark.parametrize("config", ["zero2", "zero3"])
@pytest.mark.timeout(600)
def test_a_sharded_training_saves_a_checkpoint_that_is_accepted(place: Workplace, tmp_path: Path, config: str) -> None:
    (place.path / "better.py").write_text(BETTER)
    told = place.bash(
        "cp better.py code/\n"
        'python3 code/collect.py --model "$MODEL_PATH" --out output/traces\n'
        'launch "$MODEL_PATH" train_episodes.py --out output/sft --traces output/traces --steps 3\n'
        "launch output/sft better.py --out output/online --iterations 2 --games 4 --copies 4\n",
        EXPERT_ACCELERATE=config,
    )
    print(told[-3000:])
    assert "DEEPSPEED" in told
    base = BaseModel.read(place.model, folder_content_hash(place.model))
    for name in ("sft", "online"):
        take(place.path / "output" / name, tmp_path / "taken" / name, base, "bfloat16")

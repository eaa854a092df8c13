"""The observer in real Python processes: what it tells of trainings, and that no program notices it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.files.layout import share
from autorl_hpc.recorder.trainings import step_of, steps_in
from autorl_hpc.supervise.workspace import OBSERVER

TINY = share("templates") / "models" / "tiny"

STAND_IN = {
    "torch/__init__.py": "from torch import compiler\nimport torch.optim.optimizer, torch.random\nmanual_seed = torch.random.manual_seed",
    "torch/compiler.py": "def is_compiling(): return False",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": "hooks = []\nregister_optimizer_step_post_hook = hooks.append",
    "torch/random.py": "def manual_seed(seed: int) -> str:\n    'Seed.'\n    return 'seeded'",
    "torch/utils/tensorboard/writer.py": "class SummaryWriter:\n    def add_scalar(self, tag, scalar_value, global_step=None): pass",
    "transformers/__init__.py": "",
    "transformers/trainer.py": "class Trainer:\n    args = {'learning_rate': 0.5}\n    def train(self): pass",
    "UnslothGRPOTrainer.py": "from transformers.trainer import Trainer\nclass _UnslothGRPOTrainer(Trainer): pass\n"
    "class UnslothGRPOTrainer(_UnslothGRPOTrainer): pass",
}
"""A torch that imports at once, for what doesn't depend on the real one."""

OPTIMIZER = """
class Optimizer:
    def __init__(self): self.param_groups = [{"lr": 0.5, "params": []}]
    def step(self):
        for hook in torch.optim.optimizer.hooks: hook(self, (), {})
"""


class Programs:
    """Runs programs under the observer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.observed = folder, folder / "observed"

    def lay(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(self, program: str, *, expect: int = 0, **env: str) -> str:
        """Run `program` as program.py; return what it printed."""
        self.lay({"program.py": program})
        path = os.pathsep.join([str(OBSERVER), env.pop("AFTER", str(self.folder))])
        told = {"AUTORL_OBSERVED": str(self.observed), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TINY": str(TINY)}
        made = subprocess.run(
            [sys.executable, "program.py"], cwd=self.folder, env={**os.environ, **told, **env}, capture_output=True, text=True,
            check=False, timeout=1200,
        )  # fmt: skip
        assert made.returncode == expect, made.stderr[-3000:]
        return made.stdout

    def files(self) -> list[list[dict[str, Any]]]:
        """Return the facts of each process."""
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in self.observed.glob("*.jsonl")]

    def facts(self, what: str) -> list[dict[str, Any]]:
        return [line["facts"] for file in self.files() for line in file if line["what"] == what]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    assert made.facts("note") == [], "an error of the observer"


@pytest.mark.slow
def test_a_million_steps_and_an_optimizer_for_each_step_are_some_dozen_lines(programs: Programs) -> None:
    """None is lost, and no optimizer is kept in memory."""
    programs.lay(STAND_IN)
    said = programs.run(
        f"import gc, torch, weakref\n{OPTIMIZER}\nmine = Optimizer()\nfor _ in range(10**6): mine.step()\n"
        "kept = weakref.WeakSet()\nfor _ in range(3000):\n    mine = Optimizer(); kept.add(mine); mine.step()\n"
        "del mine; gc.collect(); print(len(kept))"
    )
    steps = programs.facts("steps")
    assert said == "0\n" and len(steps) < 100
    assert sum(each["count"] for each in steps) == 10**6 + 3000 == steps[-1]["last"]
    assert [each["first"] for each in steps[1:]] == [each["last"] + 1 for each in steps[:-1]]
    assert (steps[0]["optimizer"], steps[0]["rates"]) == ("__main__.Optimizer", [0.5, 0.5])


@pytest.mark.slow
def test_forks_and_spawned_workers_write_a_file_each(programs: Programs) -> None:
    """A child that went on in its parent's file would count its parent's steps; a spawned one ends without atexit."""
    programs.lay(STAND_IN)
    programs.run(
        f"import os, multiprocessing, torch\n{OPTIMIZER}\n"
        "def work():\n    mine = Optimizer()\n    mine.step(); mine.step(); mine.step(); mine.step()\n"
        "if __name__ == '__main__':\n    Optimizer().step()\n"
        "    if os.fork() == 0:\n        work(); raise SystemExit\n    os.wait()\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work); child.start(); child.join()\n",
        RANK="1", WORLD_SIZE="2",
    )  # fmt: skip
    counts = [sum(line["facts"]["count"] for line in file if line["what"] == "steps") for file in programs.files()]
    assert sorted(counts) == [1, 4, 4]
    assert {(each["rank"], each["world_size"]) for each in programs.facts("start")} == {(1, 2)}


def test_unsloths_copies_of_trl_and_what_is_logged_to_tensorboard(programs: Programs) -> None:
    """unsloth 2026.10.9 writes each trainer of trl into a module, and puts its class in place of trl's."""
    programs.lay(STAND_IN)
    programs.run(
        "from UnslothGRPOTrainer import UnslothGRPOTrainer as Mine\nMine().train()\n"
        "from torch.utils.tensorboard.writer import SummaryWriter\nmine = SummaryWriter()\n"
        "for n in range(1, 4): mine.add_scalar('loss', 1 / n, n); mine.add_scalar('lr', global_step=n, scalar_value=n)"
    )
    assert [(each["name"], each["phase"]) for each in programs.facts("trainer")] == [
        ("unsloth.GRPOTrainer", "began"),
        ("unsloth.GRPOTrainer", "ended"),
    ]
    told = [{"loss": 1 / n, "lr": n, "step": n, "by": "tensorboard"} for n in (1, 2, 3)]
    assert programs.facts("log") == told


def test_a_crash_is_told_with_its_line_and_a_quiet_program_leaves_nothing(programs: Programs) -> None:
    programs.run("import json; print('fine')")
    assert not programs.observed.exists()
    programs.run("\ndef f():\n    raise KeyError('two\\nlines')\nf()", expect=1)
    (crash,) = programs.facts("crashed")
    assert crash == {"type": "KeyError", "message": "'two\\nlines'", "where": f"{programs.folder / 'program.py'}:3"}
    programs.run("import trl_of_nowhere", expect=1)
    assert {each["type"] for each in programs.facts("crashed")} == {"KeyError", "ModuleNotFoundError"}


def test_what_a_program_sees_is_as_without_the_observer(programs: Programs) -> None:
    """An own sitecustomize runs; wrapped functions keep name, signature, source and pickling; exceptions go through."""
    programs.lay({**STAND_IN, "sitecustomize.py": "import builtins\nbuiltins.MINE = __file__"})
    said = programs.run(
        "import inspect, pickle, sys, sitecustomize, torch\n"
        "f = torch.manual_seed\n"
        "print(MINE == sitecustomize.__file__, f(3), f.__name__, f.__module__, inspect.signature(f), f.__doc__)\n"
        "print(pickle.loads(pickle.dumps(f)) is f, 'Seed.' in inspect.getsource(f), torch.__loader__.__class__.__name__)\n"
        "try: f()\nexcept TypeError: print('TypeError')\n"
    )
    assert said.split("\n")[:3] == [
        "True seeded manual_seed torch.random (seed: int) -> str Seed.",
        "True True SourceFileLoader",
        "TypeError",
    ]


@pytest.mark.parametrize("where", ["/proc/no", "", None])
def test_an_observer_that_cannot_write_or_is_off_is_not_noticed(tmp_path: Path, where: str | None) -> None:
    programs = Programs(tmp_path)
    programs.lay(STAND_IN)
    program = f"import os, torch\n{OPTIMIZER}\nif {where is None}: del os.environ['AUTORL_OBSERVED']\nOptimizer().step()\nprint('done')"
    assert programs.run(program, **({} if where is None else {"AUTORL_OBSERVED": where})) == "done\n"
    assert programs.files() == []


LOOP = """
import json, os, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.manual_seed(3)
tokenizer = AutoTokenizer.from_pretrained(os.environ["TINY"])
model = AutoModelForCausalLM.from_pretrained(os.environ["TINY"])
rows = [json.loads(line) for line in open("rows.jsonl")]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    prompt = tokenizer(["1 + 1 = "] * 3, return_tensors="pt")
    model.generate(**prompt, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    loss = model(**prompt, labels=prompt["input_ids"]).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
model.save_pretrained("out")
torch.save(model.state_dict(), "own.pt")
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = torch.optim.SGD([weight], lr=0.5)
torch.compile(optimizer.step, backend="eager")()
assert weight.tolist() == [0.5, 0.5]
"""

TRAINERS = """
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
data = load_dataset("json", data_files="rows.jsonl", split="train")
same = dict(max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1, save_strategy="no", use_cpu=True)
adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
sft = SFTTrainer(model=os.environ["TINY"], args=SFTConfig(output_dir="sft", learning_rate=3e-4, **same), train_dataset=data, peft_config=adapter)
sft.train()
sft.save_model("adapter")
config = GRPOConfig(output_dir="grpo", num_generations=2, max_completion_length=4, beta=0.04, **same)
prompts = data.rename_column("text", "prompt")
GRPOTrainer(model=os.environ["TINY"], args=config, train_dataset=prompts, reward_funcs=lambda completions, **_: [1.0, 0.0]).train()
"""
ROWS = {"rows.jsonl": "".join(json.dumps({"text": f"{i} + 1 = {i + 1}"}) + "\n" for i in range(8))}


@pytest.mark.slow
def test_an_own_loop(programs: Programs) -> None:
    """At its end a compiled optimizer, whose hooks are traced with it."""
    programs.lay(ROWS)
    programs.run(LOOP)
    steps = [each for each in programs.facts("steps") if "AdamW" in each["optimizer"]]
    generated = programs.facts("generated")
    assert [(each["first"], each["last"]) for each in steps] == [(1, 1), (2, 2), (3, 4)]
    assert steps[0]["parameters"] == 124_224
    assert all(each["norms"][0] <= each["norm"] <= each["norms"][1] for each in steps if each["norm"] is not None)
    assert steps[0]["norm"] > 0
    assert [each["steps_before"] for each in generated] == [0, 1, 2]
    assert (generated[0]["prompts"], generated[0]["sampled"], generated[0]["model"]) == (3, True, str(TINY))
    (rows,) = programs.facts("rows")
    assert (rows["path"], rows["rows"], len(rows["sha256"])) == (str(programs.folder / "rows.jsonl"), 8, 64)
    assert programs.facts("seed") == [{"value": 3}]
    saved = {Path(each["path"]).name: (each["origin"], each["steps"]) for each in programs.facts("saved")}
    assert saved == {"out": (str(TINY), 4), "own.pt": (None, 4)}
    assert programs.facts("memory")[0]["rss_peak_bytes"] > 10**8


@pytest.mark.slow
def test_trainers_of_trl(programs: Programs) -> None:
    programs.lay(ROWS)
    said = programs.run(TRAINERS, HF_HOME=str(programs.folder / "hf"))
    printed = [step for step in steps_in(said) if "loss" in step.figures]
    assert [step.fields()["trainer"] for step in printed] == 3 * ["SFTTrainer"] + 3 * ["GRPOTrainer"]
    observed = [step for facts in programs.facts("log") if "loss" in facts and (step := step_of(facts)) is not None]
    assert [step.digest() for step in observed] == [step.digest() for step in printed], "they are written once"
    told = [(each["name"].rpartition(".")[2], each["phase"], each["rows"]) for each in programs.facts("trainer")]
    assert told == [(name, phase, 8) for name in ("SFTTrainer", "GRPOTrainer") for phase in ("began", "ended")]
    sft, ended, grpo, _ = programs.facts("trainer")
    assert "transformers.trainer.Trainer" in sft["bases"] and sft["model"] == str(TINY)
    assert sft["arguments"]["learning_rate"] == 3e-4 and grpo["arguments"]["beta"] == 0.04
    assert ended["steps"] == 3 and "train_loss" in ended["last"]
    assert {"step", "loss", "reward"} <= set(programs.facts("log")[-2])
    assert programs.facts("lora") == [{"r": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj"]}]
    assert [each["steps_before"] for each in programs.facts("generated")] == [3, 4, 5]
    assert [Path(each["path"]).name for each in programs.facts("saved")] == ["adapter"]


WORKERS = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (x,) in data:
    accelerator.backward(model(x).sum()); optimizer.step(); optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    raise RuntimeError("rank 1 fell")
"""


@pytest.mark.slow
def test_torchruns_workers_with_accelerate(programs: Programs) -> None:
    programs.lay({"worker.py": WORKERS})
    launch = "import sys; from torch.distributed.run import main; main(['--nproc-per-node', '2', 'worker.py'])"
    programs.run(launch, expect=1, OMP_NUM_THREADS="1")
    workers = [file for file in programs.files() if file[0]["program"] == "worker.py"]
    assert sorted((file[0]["facts"]["rank"], file[0]["facts"]["world_size"]) for file in workers) == [(0, 2), (1, 2)]
    assert [(each["name"], each["rows"]) for each in programs.facts("trainer")] == [
        ("accelerate.accelerator.Accelerator", 16)
    ] * 2
    assert [sum(line["facts"]["count"] for line in file if line["what"] == "steps") for file in workers] == [2, 2]
    assert "rank 1 fell" in {each["message"] for each in programs.facts("crashed")}


# --- names in libraries' sources; those that can't run here are looked up in their wheels


LIBRARIES = {
    **dict.fromkeys(("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors"), ""),
    **{"verl": "verl==0.9.1", "openrlhf": "openrlhf==0.11.2", "torchtune": "torchtune==0.6.1", "wandb": "wandb"},
    **{"lightning": "lightning==2.6.6", "pytorch_lightning": "pytorch-lightning==2.6.6"},
    **{"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"},
}
TRAINER_CLASSES = {
    "transformers": ["trainer:Trainer.train"],
    "trl": ["trainer.base_trainer:_BaseTrainer", "trainer.grpo_trainer:GRPOTrainer", "trainer.dpo_trainer:DPOTrainer"],
    "verl": ["trainer.ppo.ray_trainer:RayPPOTrainer.fit", "trainer.ppo.v1.trainer_base:PPOTrainer.fit", "trainer.sft_trainer:SFTTrainer.fit"],
    "openrlhf": ["trainer.sft_trainer:SFTTrainer.fit", "trainer.dpo_trainer:DPOTrainer.fit", "trainer.ray.ppo_actor:ActorPPOTrainer.ppo_train"],
    "lightning": ["pytorch.trainer.trainer:Trainer.fit"],
    "pytorch_lightning": ["trainer.trainer:Trainer.fit"],
    "torch": ["optim.optimizer:register_optimizer_step_post_hook", "compiler:is_compiling"],
}  # fmt: skip


def names_in(source: str) -> dict[str, list[str]]:
    """Return the functions and classes of a module with their arguments, methods as Class.method."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        inside = node.body if isinstance(node, ast.ClassDef) else []
        for prefix, each in [("", node), *((f"{getattr(node, 'name', '')}.", one) for one in inside)]:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + each.name] = [one.arg for one in (*each.args.posonlyargs, *each.args.args)] + [""] * 9
            elif isinstance(each, ast.ClassDef):
                found[prefix + each.name] = []
    return found


def sources(library: str, folder: Path) -> dict[str, str]:
    """Return the sources of a library by module name: as installed, or from its wheel in $AUTORL_WHEELS or of pip's index."""
    for place in map(Path, sys.path):
        if (place / library / "__init__.py").is_file():
            paths = (place / library).rglob("*.py")
            return {str(each.relative_to(place)): each.read_text(errors="replace") for each in paths}
    found = list(Path(os.environ.get("AUTORL_WHEELS", folder)).glob(f"{library}-*.whl"))
    if not found:
        if library == "vllm":
            pytest.skip("vllm's wheel has 340 MB: name a folder that has it by AUTORL_WHEELS")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), LIBRARIES[library]]
        if subprocess.run(command, capture_output=True, check=False, timeout=600).returncode:
            pytest.skip(f"pip can't fetch {LIBRARIES[library]}")
        found = list(folder.glob(f"{library}-*.whl"))
    with zipfile.ZipFile(found[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        return {
            name.partition(".data/purelib/")[2] or name: wheel.read(name).decode(errors="replace") for name in names
        }


@pytest.mark.soak
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_names_that_are_hooked_are_in_the_library(library: str, tmp_path: Path) -> None:
    """A renamed class, or an argument at another place, would end what is seen of a library, without any error."""
    of_logs = "(each[0].args if getattr(each[0], 'func', None) is o.logs else ())"
    read = f"import autorl_observer as o, json; print(json.dumps([[*each[1:], *{of_logs}] for each in o.PLACES]))"
    places = json.loads(subprocess.check_output([sys.executable, "-c", read], cwd=OBSERVER, text=True))
    wanted = {f"{module}:{name}": at for module, name, *at in places if module.startswith(library + ".")}
    wanted |= {f"{library}.{each}": [] for each in TRAINER_CLASSES.get(library, ())}
    files, missing = sources(library, tmp_path), []
    for each, at in wanted.items():
        module, _, name = each.partition(":")
        path = module.replace(".", "/")
        names = names_in(files.get(f"{path}.py") or files.get(f"{path}/__init__.py") or "")
        known = not at or names.get(name, [""] * 9)[at[1]] in ("step", "global_step", "start_time")
        if name not in names or not known:
            missing.append(each)
    assert wanted and missing == []


LIGHTNING = """
import torch, lightning
class Mine(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, at):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=4)
off = dict(logger=False, enable_progress_bar=False, enable_checkpointing=False)
trainer = lightning.Trainer(max_steps=3, accelerator="cpu", devices=1, **off)
trainer.fit(Mine(0.25), rows)
trainer.save_checkpoint("out/last.ckpt")
"""
TORCHTUNE = """
import pathlib, runpy, sys, torch, torchtune
from torchtune.models.llama2 import llama2
size = dict(vocab_size=32, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=16)
pathlib.Path("begin").mkdir()
torch.save(llama2(**size).state_dict(), "begin/start.pt")
recipe = str(pathlib.Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_single_device.py")
sys.argv = [recipe, "--config", "tune.yaml"]
runpy.run_path(recipe, run_name="__main__")
"""
TUNE = """
{output_dir: out, seed: 1, shuffle: true, batch_size: 2, epochs: 1, max_steps_per_epoch: 3, gradient_accumulation_steps: 1, device: cpu,
 dtype: fp32, compile: false, resume_from_checkpoint: false, optimizer_in_bwd: false, enable_activation_checkpointing: false,
 enable_activation_offloading: false, log_every_n_steps: 1, log_peak_memory_stats: false,
 tokenizer: {_component_: mine.tokenizer}, dataset: {_component_: mine.rows},
 model: {_component_: torchtune.models.llama2.llama2, vocab_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2, embed_dim: 16,
  max_seq_len: 16},
 checkpointer: {_component_: torchtune.training.FullModelTorchTuneCheckpointer, checkpoint_dir: begin, checkpoint_files: [start.pt],
  output_dir: out, model_type: LLAMA2},
 optimizer: {_component_: torch.optim.SGD, lr: 0.25}, loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss},
 metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: logs}}
"""
MINE = """
class Words:
    pad_id = 0
def tokenizer():
    return Words()
def rows(tokenizer, **_):
    return [{"tokens": [1, 2, 3, 4], "labels": [2, 3, 4, 5]} for _ in range(6)]
"""
REALLY_RUN = {
    "lightning==2.6.6 lightning-utilities torchmetrics": (LIGHTNING, "lightning.pytorch.trainer.trainer.Trainer", "lr"),
    "torchtune==0.6.1 torchao==0.15.0 torchdata==0.11.0 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 sentencepiece blobfile": (
        TORCHTUNE,
        "recipes.FullFinetuneRecipeSingleDevice",
        "optimizer.lr",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("wheels", REALLY_RUN)
def test_libraries_that_are_not_installed_are_observed_in_a_real_training(programs: Programs, wheels: str) -> None:
    """They are fetched without what they depend on, into a folder of the test."""
    folder = programs.folder / "libraries"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wheels.split()]
    if subprocess.run(command, capture_output=True, check=False, timeout=900).returncode:
        pytest.skip(f"pip can't fetch {wheels}")
    program, name, rate = REALLY_RUN[wheels]
    programs.lay({"tune.yaml": TUNE, "mine.py": MINE})
    (programs.folder / "out").mkdir()
    programs.run(program, AFTER=os.pathsep.join((str(programs.folder), str(folder))))
    trainers = programs.facts("trainer")
    assert {each["name"] for each in trainers} == {name} and trainers[0]["arguments"][rate] == 0.25
    steps = programs.facts("steps")
    assert sum(each["count"] for each in steps) == 3 and steps[-1]["rates"] == [0.25, 0.25]
    if name.startswith("recipes"):
        assert [each["step"] for each in programs.facts("log") if "loss" in each] == [1, 2, 3]
    else:
        assert (trainers[0]["rows"], trainers[1]["steps"], set(trainers[1]["last"])) == (12, 3, {"loss"})
    assert programs.facts("saved")[-1]["steps"] == 3

"""The planned route of training scripts as agents write them: folders under routes/, with the route that a reader sees.

A wrong route is a failure everywhere; `unknown` is the answer where a plain look can't be sure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.routes import executed, planned
from autorl_hpc.report.routes.commands import commands_in
from autorl_hpc.states import Route

SCRIPTS = Path(__file__).with_name("routes")

PLAIN = {
    "none": "none_data_prep none_eval_only third_ppo_never_stepped twist_model_train_mode",
    "distillation": "again_distill_claude",
    "rl": "openrlhf_reinforce",
    "sft+rl": "again_verl_sft_then_grpo trl_cli_sft_grpo",
    "dpo": "axolotl_dpo",
    "sft": "llamafactory_sft other_fake_grpo_nll third_main_of_imported torchtune_run",
    "preference": "llamafactory_simpo twist_lora_merge_not_average",
    "grpo": "other_notebook third_advantage_weighted_sft third_star_import twist_alias_renamed verl_grpo",
    "ppo": "verl_ppo_default",
    "rejection-sampling": "rejection_sampling_files",
    "model-averaging": "soup_mergekit",
}
"""Folders by what a reader sees, also where their words say something else (`twist_`, `other_`)."""

UNDECIDED = (
    "copy_cp_shell other_grpo_env_zero other_rm_only_copy third_download twist_zero_steps "
    "other_backward_no_opt other_reassigned_trainer twist_python2_broken other_slerp other_try_fallback "
    "twist_heredoc held_noise twist_exec_opaque"
)
"""What a plain look can't be sure of."""

WITH_COMMANDS: list[tuple[str, ...]] = [
    ("dpo", "twist_script_not_run", "python train_dpo.py"),
    ("dpo", "other_dpo_makefile", "make all"),
    ("grpo", "twist_script_not_run", "nohup /opt/venv/bin/python -u /scratch/ws/code/train_grpo.py"),
    ("grpo", "none_data_prep", "trl grpo --model_name_or_path models/base --dataset_name data/grpo_prompts.jsonl"),
    ("grpo", "other_trlparser", "accelerate launch --config_file z2.yaml main.py --config recipes/grpo.yaml"),
    ("grpo", "other_grpo_bg_server", "bash run.sh"),
    ("grpo", "other_notebook", "jupyter nbconvert --to notebook --execute run.ipynb"),
    ("sft", "axolotl_sft_config_only", "axolotl train config.yml"),
    ("sft+rl", "sft_rl_two_scripts", "python 01_sft.py", "python 02_rloo.py"),
    ("sft", "sft_rl_two_scripts", "python 01_sft.py"),
    ("rl", "sft_rl_two_scripts", "python 02_rloo.py"),
    ("distillation", "other_distill_openai_filtered", "python gen.py", "python sft.py"),
    ("ppo", "other_ppo_with_rm", "python a_rm.py", "python b_ppo.py"),
    ("unknown", "other_stage_env", "bash pipeline.sh"),
    ("unknown", "other_loss_registry_dict", "python train.py dpo"),
]
"""What is told of a folder with the command lines that were seen."""

SFT = "from trl import SFTTrainer\nSFTTrainer('m').train()\n"
GRPO = "from trl import GRPOTrainer\nGRPOTrainer('m', reward_funcs=len).train()\n"
BY_OPTION = """import argparse
from trl import *
p = argparse.ArgumentParser()
p.add_argument("--algo", default="sft")
a = p.parse_args()
if a.algo == "sft":
    SFTTrainer("m").train()
else:
    GRPOTrainer("m", reward_funcs=len).train()
"""
BUILD = """from trl import *
def build(kind):
    if kind == "grpo":
        return GRPOTrainer("m", reward_funcs=len)
    return SFTTrainer("m")
"""
TWO = """import sys, argparse, fire
from trl import *
def sft(a=1): SFTTrainer('m').train()
def grpo(a=1): GRPOTrainer('m', reward_funcs=len).train()
"""
MODELS = """import torch
from transformers import AutoModelForCausalLM
a = AutoModelForCausalLM.from_pretrained("a")
b = AutoModelForCausalLM.from_pretrained("b")
"""
ENDS = "a.save_pretrained('out')\n"
SAMPLES = """import json
from vllm import LLM
rows = LLM("b").generate(prompts)
with open("kept.jsonl", "w") as file:
    for row, a in zip(rows, known):
        for c in row.outputs:
            if CHECK:
                file.write(json.dumps({"text": c.text}))
"""
ON_SAMPLES = "from trl import SFTTrainer\nSFTTrainer('b', train_dataset=load('kept.jsonl')).train()\n"
STAGES = {
    "s.py": "from trl import *\nt = SFTTrainer('m')\nt.train()\nt.save_model('out/sft')\n",
    "t.py": "from trl import *\nGRPOTrainer('out/sft', reward_funcs=len).train()\n",
}
LOOP = """import torch, torch.nn.functional as F
def logps(m, ids): return m(ids).logits.log_softmax(-1).gather(-1, ids[..., None]).sum(-1)
for batch in data:
    LOSS
    loss.backward()
    opt.step()
"""
LOOPS = {
    "sft": "loss = model(**batch, labels=batch['input_ids']).loss",
    "dpo": "loss = -F.logsigmoid(0.1 * (logps(policy, batch.a) - logps(ref_model, batch.a))).mean()",
    "preference": "loss = -F.logsigmoid(logps(model, batch.chosen) - logps(model, batch.rejected) - 1).mean()",
    "ppo": "ratio = (logps(m, b) - old).exp(); v = F.mse_loss(value_head(b), ret)\n"
    "    loss = -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean() + v",
    "grpo": "adv = (rewards - rewards.mean()) / (rewards.std() + 1e-4)\n    loss = -(adv * logps(model, batch)).mean()",
    "rl": "loss = -(logps(model, batch) * rewards).mean()",
    "distillation": "loss = F.kl_div(model(batch).logits.log_softmax(-1), teacher(batch).logits.softmax(-1))",
    "unknown": "loss = model(batch).sum()",
}
"""Own loops by what flows into their `backward()`."""

OPEN = "an open condition"

SMALL: dict[str, list[tuple[Any, ...]]] = {
    "unknown": [
        (OPEN, {"a.py": TWO + "RL = False\nif RL: grpo()\nelse: sft()\n"}),
        (OPEN, {"t.py": BY_OPTION}, "python t.py --algo grpo"),
        (OPEN, {"t.py": BY_OPTION, "run.sh": "for s in sft grpo; do python t.py --algo $s; done\n"}, "bash run.sh"),
        (OPEN, {"a.py": BUILD + "t = build('sft')\nt.train()\n"}),
        (OPEN, {"a.py": BUILD + "t = build('sft')\nt.train()\nt = build('grpo')\nt.train()\n"}),
        (OPEN, {"a.py": TWO + "{'sft': sft, 'grpo': grpo}[sys.argv[1]]()\n"}, "python a.py sft"),
        (OPEN, {"a.py": TWO + "fire.Fire()\n"}, "python a.py sft"),
        (OPEN, {"a.py": TWO + "match sys.argv[1]:\n  case 'sft': sft()\n  case _: grpo()\n"}, "python a.py sft"),
        (OPEN, {"a.py": TWO + "if sys.argv[1:]:\n  sft()\n  sys.exit()\ngrpo()\n"}),
        (OPEN, {"a.py": TWO + "def main():\n  if x: return sft()\n  grpo()\nmain()\n"}),
        (OPEN, {"a.py": TWO + "T = SFTTrainer\nif x: T = GRPOTrainer\nT('m').train()\n"}),
        (OPEN, {"a.py": TWO + "for T in (SFTTrainer, GRPOTrainer): T('m').train()\n"}),
        (OPEN, {**STAGES, "run.sh": "if [ $1 ]; then python s.py; else python t.py; fi\n"}, "bash run.sh x"),
        (OPEN, {**STAGES, "run.sh": "case $1 in\n a) python s.py;;\n b) python t.py;;\nesac\n"}, "bash run.sh a"),
        ("nothing joins them", {"a.py": SFT, "b.py": GRPO}),
        ("unchecked", {"a.py": SAMPLES.replace("CHECK", "len(c.text) > 9"), "b.py": ON_SAMPLES}),
        (
            "averaged",
            {"a.py": MODELS + "for p, q in zip(a.parameters(), b.parameters()): p.data.lerp_(q, 0.5)\n" + ENDS},
        ),
        ("noise", {"a.py": MODELS + "for p in a.parameters(): p.add_(torch.randn_like(p))\n" + ENDS}),
        ("saved again", {"a.py": MODELS + ENDS}),
        ("no step", {"a.py": MODELS + "a(ids, labels=ids).loss.backward()\n"}),
        (
            "gold",
            {"a.py": SAMPLES.replace("CHECK", "a not in c.text").replace("c.text})", "row})"), "b.py": ON_SAMPLES},
        ),
        ("adapter", {"a.py": MODELS + "a = PeftModel.from_pretrained(a, 'l').merge_and_unload()\n" + ENDS}),
        ("a reward model", {"a.py": MODELS + "F.logsigmoid(a(chosen) - a(rejected)).backward()\nopt.step()\n"}),
        ("unread command", {"run.sh": "PY=python\n$PY a.py\n", "a.py": SFT}, "bash run.sh"),
        ("half-written", {"a.py": "from trl import GRPOTrainer\nt = GRPOTrainer(model='m',\n"}),
    ],
    "sft": [
        ("dead code", {"a.py": TWO + "def main():\n  sft()\n  return\n  grpo()\nmain()\n"}),
        ("never called", {"a.py": TWO + "sft()\n"}),
        ("handed over", {"a.py": "from trl import SFTTrainer\nt = SFTTrainer('m')\nThread(target=t.train).start()\n"}),
    ],
    "sft+rl": [
        ("commands in order", STAGES, "cd code && X=1 python s.py && python t.py > log 2>&1 &"),
        ("each command once", STAGES, "python s.py && python t.py", "python s.py", "python t.py"),
    ],
    "grpo": [
        ("one command", STAGES, "cd code; python t.py --lr 3 | tee log"),
    ],
    "rejection-sampling": [
        ("checked", {"a.py": SAMPLES.replace("CHECK", "extract(c.text) == a"), "b.py": ON_SAMPLES}),
    ],
    "none": [
        ("words only", {"a.py": 'x = """\nGRPOTrainer(\n"""\n# GRPOTrainer(\ns = "GRPOTrainer("\n'}),
    ],
}
"""By what is told: what a case guards, its files, and command lines."""


@pytest.mark.parametrize("route", LOOPS)
def test_own_loops_are_told_by_their_loss(route: str) -> None:
    assert planned({"a.py": LOOP.replace("LOSS", LOOPS[route])}).route == route


def files_of(name: str) -> dict[str, str]:
    """The text of each file of a folder, by path."""
    folder = SCRIPTS / name
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in sorted(folder.rglob("*")) if p.is_file()}


def names_of(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, route) for route, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("name", "route"), [*names_of(PLAIN), *names_of({"unknown": UNDECIDED})])
def test_the_planned_route_is_what_a_reader_sees(name: str, route: str) -> None:
    told = planned(files_of(name))
    assert told.route == route, told
    assert route in ("none", "unknown") or told.evidence
    assert route != "unknown" or told.confidence == 0.0


@pytest.mark.parametrize("case", WITH_COMMANDS, ids=str)
def test_commands_that_were_seen_decide_which_scripts_ran(case: tuple[str, ...]) -> None:
    told, name, *commands = case
    assert planned(files_of(name), commands).route == told


LINES: list[tuple[str, list[tuple[str, str]]]] = [
    # a command line of a process or a shell, and what it runs
    ("python -u code/train.py --lr 1", [("script", "code/train.py")]),
    ("CUDA_VISIBLE_DEVICES=0,1 nohup torchrun --nproc_per_node 2 train.py > log 2>&1 &", [("script", "train.py")]),
    ("python -m torch.distributed.run --nproc-per-node=2 -m pkg.train", [("module", "pkg.train")]),
    ("deepspeed --include localhost:0,1 train.py --deepspeed ds.json", [("script", "train.py")]),
    ("accelerate launch --config_file z.yaml --num_processes 4 train.py", [("script", "train.py")]),
    ("uv run --with trl python train.py", [("script", "train.py")]),
    ("uv run train.py --lr 1", [("script", "train.py")]),
    ("apptainer exec --nv img.sif python train.py", [("script", "train.py")]),
    ("docker run --rm -v /a:/b image:1 torchrun train.py", [("script", "train.py")]),
    ("srun -N1 --gres=gpu:1 bash -c 'cd code && python train.py'", [("other", "cd"), ("script", "train.py")]),
    ("timeout -k 5 600 python train.py", [("script", "train.py")]),
    ("jupyter nbconvert --to notebook --execute run.ipynb", [("script", "run.ipynb")]),
    ("python -m nbconvert --execute run.ipynb", [("script", "run.ipynb")]),
    ("papermill in.ipynb out.ipynb -p lr 1", [("script", "in.ipynb")]),
    ("python -c 'import train; train.main()'", [("inline", "import train; train.main()")]),
    ("python3 -c import train; train.main()", [("inline", "import train; train.main()")]),
    ("bash -c cd code && python train.py", [("other", "cd"), ("script", "train.py")]),
    (
        "python - <<'EOF'\nimport train\ntrain.main()\nEOF\necho done",
        [("inline", "import train\ntrain.main()"), ("other", "echo")],
    ),
    ("bash <<EOF\npython a.py\nEOF", [("script", "a.py")]),
    ("cat > train.py <<'EOF'\npython = 1\nEOF\npython train.py", [("other", "cat"), ("script", "train.py")]),
    ("trl sft --model m", [("program", "trl")]),
    ("python train.py \\\n  --lr 1 && ./submit out", [("script", "train.py"), ("other", "submit")]),
]


@pytest.mark.parametrize(("line", "runs"), LINES, ids=[line for line, _ in LINES])
def test_what_a_command_line_runs(line: str, runs: list[tuple[str, str]]) -> None:
    assert [(ran.command.kind, ran.command.target) for ran in commands_in(line)] == runs


@pytest.mark.parametrize(("told", "case"), [(told, case) for told, cases in SMALL.items() for case in cases])
def test_small_scripts(told: str, case: tuple[Any, ...]) -> None:
    what, files, *commands = case
    assert planned(files, commands).route == told, what


def test_alternatives_are_named_where_a_condition_is_open() -> None:
    told = planned({"t.py": BY_OPTION}, ["python t.py"])
    assert set(told.alternatives) == {Route.SFT, Route.GRPO}


LOGGED_BY = {
    "sft": ("SFTTrainer",),
    "rejection-sampling": ("SFTTrainer",),
    "distillation": ("SFTTrainer",),
    "grpo": ("GRPOTrainer",),
    "rl": ("GRPOTrainer", "DPOTrainer"),
    "ppo": ("PPOTrainer",),
    "dpo": ("DPOTrainer",),
    "preference": ("DPOTrainer",),
    "sft+rl": ("SFTTrainer", "GRPOTrainer"),
}
"""Trainers whose logs are honest beside such code."""


def test_honest_logs_are_never_disputed() -> None:
    for name, route in names_of(PLAIN):
        plan = planned(files_of(name))
        for trainer in LOGGED_BY.get(route, ()):
            point = TrainingPoint(elapsed_s=1.0, at="x", source="agent.log", trainer=trainer, step=1, loss=1.0)
            assert not executed([point], [], None, plan).disputed, (name, trainer, plan)


def test_every_folder_is_expected_to_be_something() -> None:
    known = {name for name, _ in names_of(PLAIN)} | set(UNDECIDED.split()) | {case[1] for case in WITH_COMMANDS}
    assert {p.name for p in SCRIPTS.iterdir() if p.is_dir()} - {"__pycache__"} == known

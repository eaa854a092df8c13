"""The planned route of training scripts as agents write them: folders under routes/, with the route that a reader sees.

A wrong route is a failure everywhere; `unknown` is the answer where a plain look can't be sure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.routes import executed, planned
from autorl_hpc.states import Route

SCRIPTS = Path(__file__).with_name("routes")

PLAIN = {
    "sft": "sft_lora_argparse loop_sft_plain llamafactory_sft axolotl_sft_config_only torchtune_run",
    "grpo": "grpo_trl_vllm loop_grpo_plain verl_grpo",
    "dpo": "dpo_trl loop_dpo_plain axolotl_dpo",
    "ppo": "ppo_trl ppo_old_step loop_ppo_plain verl_ppo_default",
    "sft+rl": "sft_then_grpo_one_file sft_rl_two_scripts subprocess_pipeline trl_cli_sft_grpo",
    "rejection-sampling": "rejection_sampling_files rejection_sampling_one_file loop_rejection_ce",
    "model-averaging": "soup_mergekit",
    "distillation": "distill_logits distill_outputs",
    "copy": "copy_cp_shell",
    "none": "none_data_prep none_eval_only",
    "rl": "loop_reinforce openrlhf_reinforce",
    "preference": "llamafactory_simpo",
}
"""Scripts that say what they do."""

STRANGE = {
    "sft": "twist_comment_mentions twist_import_unused twist_if_false twist_never_called twist_sft_named_grpo "
    "twist_sft_with_eval held_sft_hfparser held_fake_ppo third_main_of_imported "
    "other_fake_grpo_nll "
    "other_early_return",
    "grpo": "twist_alias_renamed twist_helper_module twist_trainer_subclass_grpo twist_class_inherits "
    "held_grpo_modules again_grpo_agent_env third_star_import third_advantage_weighted_sft "
    "other_own_grpo_view",
    "dpo": "twist_trainer_subclass_dpo held_iterative_dpo",
    "none": "twist_train_commented twist_model_train_mode again_best_of_n_no_train third_ppo_never_stepped",
    "unknown": "twist_exec_opaque held_noise",
    "preference": "twist_lora_merge_not_average held_orpo_own other_kto_trl_exp",
    "rl": "held_rloo_class again_online_dpo other_reward_weighted other_trainer_subclass_reinforce",
    "rejection-sampling": "held_rejection_server other_rft_vllm",
    "distillation": "held_gkd again_distill_claude again_trainer_subclass_kl",
    "ppo": "held_ppo_class other_own_ppo_value",
    "sft+rl": "again_verl_sft_then_grpo",
}
"""Scripts whose words say something else than what they do, and scripts by others, that the plain look tells all the same."""

UNDECIDED = {
    "model-averaging": "soup_state_dict soup_interpolate other_slerp",
    "grpo": "other_notebook twist_getattr_importlib twist_heredoc other_try_fallback",
    "copy": "copy_base other_grpo_env_zero twist_zero_lr twist_zero_steps third_download other_rm_only_copy",
    "sft": "twist_python2_broken again_grpo_commented_back_to_sft other_reassigned_trainer other_sft_eval_hard_mining",
    "none": "held_eval_lm_harness other_backward_no_opt",
    "sft+rl": "held_bash_functions",
    "preference": "held_hydra_cfg",
    "rl": "third_async",
}
"""What a reader sees, and the plain look doesn't: it says `unknown`."""

WITH_COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "dpo": [
        ("twist_script_not_run", "python train_dpo.py"),
        ("dpo_trl", "bash run.sh", "python build_pairs.py", "python train_dpo.py"),
        ("other_dpo_makefile", "make all"),
    ],
    "grpo": [
        ("twist_script_not_run", "nohup /opt/venv/bin/python -u /scratch/ws/code/train_grpo.py"),
        ("grpo_trl_vllm", "python -c 'import torch; print(torch.__version__)'", "cp -r data backup"),
        ("none_data_prep", "trl grpo --model_name_or_path models/base --dataset_name data/grpo_prompts.jsonl"),
        ("grpo_trl_vllm", "ls -la", "vim train.py", "cat train.py"),
        ("other_trlparser", "accelerate launch --config_file z2.yaml main.py --config recipes/grpo.yaml"),
        ("other_grpo_bg_server", "bash run.sh"),
    ],
    "sft": [("sft_rl_two_scripts", "python 01_sft.py")],
    "rl": [("sft_rl_two_scripts", "python 02_rloo.py")],
    "none": [
        ("none_eval_only", "python evaluate.py output/v1"),
        ("none_eval_only", "cp -r data backup", "python evaluate.py output/v1"),
    ],
    "copy": [("none_eval_only", "cp -r models/Qwen2.5-0.5B output/v1")],
    "distillation": [("other_distill_openai_filtered", "python gen.py", "python sft.py")],
    "ppo": [("other_ppo_with_rm", "python a_rm.py", "python b_ppo.py")],
    "sft+rl": [("other_execv_chain", "python one.py")],
}
"""By what a reader sees: a folder, and the command lines that were seen."""

UNDECIDED_COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "sft": [("twist_mode_flag", "python train.py --method sft --lr 1e-5"), ("third_registry", "python main.py sft")],
    "grpo": [
        ("twist_mode_flag", "accelerate launch --num_processes 2 code/train.py --method=grpo"),
        ("third_registry", "python main.py grpo"),
    ],
    "sft+rl": [
        ("twist_mode_flag", "python train.py --method sft", "python train.py --method grpo --model output/m"),
        ("other_stage_env", "bash pipeline.sh"),
    ],
    "dpo": [("other_loss_registry_dict", "python train.py dpo")],
}
"""The same where the plain look says `unknown`."""

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
OPEN = "an open condition"

SMALL: dict[str, list[tuple[Any, ...]]] = {
    "unknown": [
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
        ("both stages", {"a.py": TWO + "sft()\ngrpo()\n"}),
        ("both stages", {"a.py": TWO.replace("O('m'", "O(x") + "sft()\nif sys.argv[1:]: pass\ngrpo()\n"}),
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
        ("a constant", {"a.py": TWO + "RL = False\nif RL: grpo()\nelse: sft()\n"}),
        ("dead code", {"a.py": TWO + "def main():\n  sft()\n  return\n  grpo()\nmain()\n"}),
        ("never called", {"a.py": TWO + "sft()\n"}),
        ("handed over", {"a.py": "from trl import SFTTrainer\nt = SFTTrainer('m')\nThread(target=t.train).start()\n"}),
    ],
    "sft+rl": [
        ("commands in order", STAGES, "cd code && X=1 python s.py && python t.py > log 2>&1 &"),
        ("each command once", STAGES, "python s.py && python t.py", "python s.py", "python t.py"),
        ("started", {"a.py": SFT + "import os\nos.system(f'{sys.executable} b.py')\n", "b.py": STAGES["t.py"]}),
    ],
    "grpo": [
        ("one command", STAGES, "cd code; python t.py --lr 3 | tee log"),
        ("started", {"a.py": "import os\nos.execv('python', ['python', 'b.py'])\n" + SFT, "b.py": GRPO}),
    ],
    "rejection-sampling": [
        ("checked", {"a.py": SAMPLES.replace("CHECK", "extract(c.text) == a"), "b.py": ON_SAMPLES}),
    ],
    "distillation": [
        ("other model", {"a.py": SAMPLES.replace('"b"', '"big"'), "b.py": ON_SAMPLES}),
    ],
    "none": [
        ("words only", {"a.py": 'x = """\nGRPOTrainer(\n"""\n# GRPOTrainer(\ns = "GRPOTrainer("\n'}),
    ],
}
"""By what is told: what a case guards, its files, and command lines."""


def files_of(name: str) -> dict[str, str]:
    """The text of each file of a folder, by path."""
    folder = SCRIPTS / name
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in sorted(folder.rglob("*")) if p.is_file()}


def names_of(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, route) for route, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("name", "route"), [*names_of(PLAIN), *names_of(STRANGE)])
def test_the_planned_route_is_what_a_reader_sees(name: str, route: str) -> None:
    told = planned(files_of(name))
    assert told.route == route, told
    assert route == "none" or told.evidence


@pytest.mark.parametrize(("name", "route"), names_of(UNDECIDED))
def test_what_the_plain_look_cannot_decide_is_unknown(name: str, route: str) -> None:
    told = planned(files_of(name))
    assert told.route is Route.UNKNOWN and told.confidence == 0.0, (route, told)


COMMANDS = [*((route, *each) for route, cases in WITH_COMMANDS.items() for each in cases)]
COMMANDS += [("unknown", *each) for cases in UNDECIDED_COMMANDS.values() for each in cases]


@pytest.mark.parametrize("case", COMMANDS, ids=str)
def test_commands_that_were_seen_decide_which_scripts_ran(case: tuple[str, ...]) -> None:
    told, name, *commands = case
    assert planned(files_of(name), commands).route == told


@pytest.mark.parametrize(("told", "case"), [(told, case) for told, cases in SMALL.items() for case in cases])
def test_small_scripts(told: str, case: tuple[Any, ...]) -> None:
    what, files, *commands = case
    assert planned(files, commands).route == told, what


def test_alternatives_are_named_where_a_condition_is_open() -> None:
    told = planned({"t.py": BY_OPTION}, ["python t.py"])
    assert {each.route for each in told.alternatives} == {Route.SFT, Route.GRPO}


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
    for name, route in [*names_of(PLAIN), *names_of(STRANGE), *names_of(UNDECIDED)]:
        plan = planned(files_of(name))
        for trainer in LOGGED_BY.get(route, ()):
            point = TrainingPoint(elapsed_s=1.0, at="x", source="agent.log", trainer=trainer, step=1, loss=1.0)
            assert not executed([point], [], None, plan).disputed, (name, trainer, plan)


def test_every_folder_is_expected_to_be_something() -> None:
    known = {name for name, _ in [*names_of(PLAIN), *names_of(STRANGE), *names_of(UNDECIDED)]}
    known |= {name for _, name, *_ in COMMANDS}
    assert {p.name for p in SCRIPTS.iterdir() if p.is_dir()} - {"__pycache__"} == known

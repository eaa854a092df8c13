"""The planned route of scripts by another author than the classifier's: folders `routes/other_*`, and small cases.

Of the folders 27 of 33 were right when they were first tried. The small cases were written down with the mending, after his.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from autorl_hpc.report.routes import planned

SCRIPTS = Path(__file__).with_name("routes")

FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft_peft_merge": ("sft", ()),
    "rft_vllm": ("rejection-sampling", ()),
    "fake_grpo_nll": ("sft", ()),
    "own_grpo_view": ("grpo", ()),
    "own_ppo_value": ("ppo", ()),
    "dpo_makefile": ("dpo", ("make all",)),
    "accelerate_loop_sft": ("sft", ()),
    "expert_iter": ("rejection-sampling", ()),
    "sft_with_ema": ("sft", ()),
    "slerp": ("model-averaging", ()),
    "own_rloo": ("rl", ()),
    "grpo_env_zero": ("copy", ()),
    "reassigned_trainer": ("sft", ()),
    "try_fallback": ("grpo", ()),
    "kto_trl_exp": ("preference", ()),
    "stage_env": ("sft+rl", ("bash pipeline.sh",)),
    "distill_openai_filtered": ("distillation", ("python gen.py", "python sft.py")),
    "notebook": ("grpo", ()),
    "copytree_bf16": ("copy", ()),
    "reward_weighted": ("rl", ()),
    "trlparser": ("grpo", ("accelerate launch --config_file z2.yaml main.py --config recipes/grpo.yaml",)),
    "loss_registry_dict": ("dpo", ("python train.py dpo",)),
    "backward_no_opt": ("none", ()),
    "unsloth_sft": ("sft", ()),
    "grpo_bg_server": ("grpo", ("bash run.sh",)),
    "sft_eval_hard_mining": ("sft", ()),
    "ppo_with_rm": ("ppo", ("python a_rm.py", "python b_ppo.py")),
    "rm_only_copy": ("copy", ()),
    "package_m": ("grpo", ("python -m rlpkg grpo --lr 2e-6",)),
    "majority_rs": ("rejection-sampling", ()),
    "trainer_subclass_reinforce": ("rl", ()),
    "early_return": ("sft", ()),
    "execv_chain": ("sft+rl", ("python one.py",)),
}
"""Route as their author wrote it down, and the commands seen with it."""

MISSED = ("package_m",)

BY_ENVIRONMENT = """import os
from trl import *
if os.environ["STAGE"] == "sft":
    SFTTrainer("m").train()
else:
    GRPOTrainer("m", reward_funcs=len).train()
"""
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
BY_FLAG = """import argparse
from trl import *
p = argparse.ArgumentParser()
p.add_argument("--no-sft", dest="sft", action="store_false")
a = p.parse_args()
if a.sft:
    SFTTrainer("m").train()
GRPOTrainer("m", reward_funcs=len).train()
"""
BOTH_FLAGS = BY_FLAG.replace(
    '"--no-sft", dest="sft", action="store_false"', '"--sft", action=argparse.BooleanOptionalAction, default=True'
)
SFT = "import os, sys, subprocess, asyncio, runpy, multiprocessing as mp\nfrom trl import SFTTrainer\nSFTTrainer('m').train()\n"
GRPO = "from trl import GRPOTrainer\nGRPOTrainer('m', reward_funcs=len).train()\n"
STARTS = (
    'os.system(f"{sys.executable} two.py")',
    'os.system(sys.executable + " two.py")',
    'os.execv(sys.executable, [sys.executable, "two.py"])',
    'os.execvp("python", ["python", "two.py"])',
    'os.execlp("python", "python", "two.py")',
    'os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "two.py"])',
    'asyncio.run(asyncio.create_subprocess_exec(sys.executable, "two.py"))',
    'mp.Process(target=runpy.run_path, args=("two.py",)).start()',
)


def kinds(files: dict[str, str], command: str) -> set[str]:
    """The planned route with its alternatives, and never both sure and undecided."""
    told = planned(files, [command])
    found = {told.route.value, *(a.route.value for a in told.alternatives)}
    assert told.confidence <= 0.7 if told.alternatives else told.confidence > 0.5
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_what_its_author_says(name: str) -> None:
    root = SCRIPTS / f"other_{name}"
    files = {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}
    route, commands = FOLDERS[name]
    assert (planned(files, commands).route == route) is (name not in MISSED)


@pytest.mark.parametrize(
    ("script", "command", "shell", "right"),
    [
        (BY_ENVIRONMENT, "bash run.sh", "STAGE=sft python t.py\nSTAGE=rl python t.py\n", {"sft", "grpo", "sft+rl"}),
        (BY_ENVIRONMENT, "bash run.sh", "export STAGE=rl\npython t.py\n", {"grpo"}),
        (BY_OPTION, "bash run.sh", "for s in sft grpo; do python t.py --algo $s; done\n", {"sft", "grpo", "sft+rl"}),
        (BY_OPTION, "bash run.sh", "for s in sft grpo\ndo\n  python t.py --algo $s\ndone\n", {"sft", "grpo", "sft+rl"}),
        (BY_OPTION, "bash run.sh", "for s in $UNKNOWN; do\n  python t.py --algo $s\ndone\n", {"sft", "grpo"}),
        (BY_OPTION, "bash run.sh", 'ARGS=(--algo grpo)\npython t.py "${ARGS[@]}"\n', {"grpo"}),
        (BY_OPTION, "bash run.sh", 'ARGS=(\n  --algo\n)\nARGS+=(grpo)\npython t.py "${ARGS[@]}"\n', {"grpo"}),
        (BY_OPTION, "bash run.sh --algo grpo", 'python t.py "$@"\n', {"grpo"}),
        (BY_OPTION, "bash run.sh", 'f() { :; }\ng() {\n  python t.py "$@"\n}\ng --algo grpo\n', {"grpo"}),
        (BY_OPTION, "bash run.sh", "python t.py $EXTRA\n", {"sft", "grpo"}),
        (BY_OPTION, "bash run.sh", "EXTRA=\npython t.py $EXTRA\n", {"sft"}),
        (BY_OPTION, "bash run.sh", "ARGS='--algo grpo'\npython t.py $ARGS\n", {"grpo"}),
        (BY_FLAG, "python t.py --no-sft", "", {"grpo"}),
        (BOTH_FLAGS, "python t.py --no-sft", "", {"grpo"}),
        (BY_FLAG, "python t.py", "", {"sft", "grpo", "sft+rl"}),
    ],
)
def test_words_of_shells_decide(script: str, command: str, shell: str, right: set[str]) -> None:
    assert kinds({"t.py": script, "run.sh": shell}, command) == right


BUILD = """from trl import *
def build(kind):
    if kind == "grpo":
        return GRPOTrainer("m", reward_funcs=len)
    return SFTTrainer("m")
"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("t = build('grpo')\nt = build('sft')\nt.train()\n", {"sft"}),
        ("t = build('sft')\nt = build('grpo')\nt.train()\n", {"grpo"}),
        ("t = build('sft')\nt.train()\nt = build('grpo')\nt.train()\n", {"sft", "grpo", "sft+rl"}),
        ("if x:\n  t = build('sft')\nelse:\n  t = build('grpo')\nt.train()\n", {"sft", "grpo"}),
        ("t = build('sft')\nif x:\n  t = build('grpo')\nt.train()\n", {"sft", "grpo", "sft+rl"}),
    ],
)
def test_the_last_assignment_counts(text: str, right: set[str]) -> None:
    assert kinds({"a.py": BUILD + text}, "python a.py") == right


TWO = "from trl import *\ndef sft(a=1): SFTTrainer('m').train()\ndef grpo(a=1): GRPOTrainer('m', reward_funcs=len).train()\n"
CLIS = {
    "subparsers": "import argparse\n"
    + TWO
    + """p = argparse.ArgumentParser()
s = p.add_subparsers(dest="cmd", required=True)
x = s.add_parser("sft")
x.set_defaults(func=sft)
x = s.add_parser("grpo")
x.add_argument("--lr")
x.set_defaults(func=grpo)
a = p.parse_args()
a.func(a)
""",
    "the name of a subparser": "import argparse\n"
    + TWO
    + """p = argparse.ArgumentParser()
s = p.add_subparsers(dest="cmd")
s.add_parser("sft")
s.add_parser("grpo")
a = p.parse_args()
if a.cmd == "sft": sft()
elif a.cmd == "grpo": grpo()
""",
    "typer": "import typer\napp = typer.Typer()\n"
    + TWO.replace("def sft", "@app.command()\ndef sft").replace("def grpo", '@app.command("grpo")\ndef other')
    + "app()\n",
    "click": "import click\n@click.group()\ndef app(): pass\n"
    + TWO.replace("def sft", "@app.command()\ndef sft").replace("def grpo", "@app.command(name='grpo')\ndef other")
    + "app()\n",
    "fire with a dictionary": "import fire\n" + TWO + "fire.Fire({'sft': sft, 'grpo': grpo})\n",
    "fire with the module": "import fire\n" + TWO + "fire.Fire()\n",
    "fire with a class": "import fire\n"
    + TWO
    + "class C:\n  def sft(self): sft()\n  def grpo(self): grpo()\nfire.Fire(C)\n",
    "match": "import sys\n" + TWO + "match sys.argv[1]:\n  case 'sft': sft()\n  case 'grpo' | 'rl': grpo()\n",
}


@pytest.mark.parametrize("name", CLIS)
def test_the_command_line_names_what_runs(name: str) -> None:
    for word in ("sft", "grpo"):
        assert kinds({"a.py": CLIS[name]}, f"python a.py {word} --lr 1") == {word}
    assert {"sft", "grpo"} <= kinds({"a.py": CLIS[name]}, "python a.py $WHICH")


def test_a_package_is_run_by_its_main() -> None:
    files = {"pkg/__init__.py": "", "pkg/__main__.py": "from .go import main\nmain()\n"}
    files["pkg/go.py"] = TWO + "import fire\nclass C:\n  def sft(self): sft()\n  def grpo(self): grpo()\n"
    files["pkg/go.py"] += "def main(): fire.Fire(C)\n"
    assert kinds(files, "python -m pkg grpo --lr 1") == {"grpo"}


@pytest.mark.parametrize(
    "text",
    [
        "for a in 1 2 3 4 5 6 7 8; do\n" * 6 + "python t.py $a\n" * 700 + "done\n" * 6,
        "for a in 1 2\n" * 5_000,
        "for a in" + " " * 100_000 + "\n" + "ARGS=(" * 5_000,
        "for a in 1; do " * 5_000 + "done " * 5_000,
        "ARGS=(\n" + "a b c\n" * 4_000 + 'python t.py "${ARGS[@]}" "$@"\n' * 900,
    ],
    ids=["nested", "no end", "spaces", "one line", "arrays"],
)
def test_loops_and_arrays_that_want_to_stall_it(text: str) -> None:
    begun = time.monotonic()
    planned({"run.sh": text, "t.py": BY_OPTION}, ["bash run.sh " + "x " * 5_000])
    assert time.monotonic() - begun < 100.0


def test_a_process_that_a_followed_script_started_is_no_second_one() -> None:
    files = {"t.py": BY_ENVIRONMENT, "run.sh": "export STAGE=rl\npython t.py --x 1\n"}
    told = planned(files, ["bash run.sh", "python t.py --x 1"])
    assert (told.route, told.alternatives) == ("grpo", ())


@pytest.mark.parametrize("start", STARTS)
def test_a_program_that_is_started_is_followed(start: str) -> None:
    assert "grpo" in kinds({"one.py": f"{SFT}{start}\n", "two.py": GRPO}, "python one.py")


def test_nothing_is_reached_behind_a_program_that_takes_the_process_over() -> None:
    one = 'import os\nos.execv("python", ["python", "two.py"])\n' + SFT
    assert kinds({"one.py": one, "two.py": GRPO}, "python one.py") == {"grpo"}


@pytest.mark.parametrize(
    ("ending", "route"), [("", "none"), ("for p in m.parameters(): p.data -= lr * p.grad\n", "sft")]
)
def test_a_loss_is_learned_from_by_a_step(ending: str, route: str) -> None:
    text = (
        "import torch\nfrom transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('m')\n"
    )
    text += f"lr = 1e-4\nm(ids, labels=ids).loss.backward()\n{ending}"
    assert planned({"a.py": text}).route == route


def test_a_helper_that_mixes_two_state_dicts() -> None:
    text = "from safetensors.torch import load_file, save_file\nA = load_file('a')\nB = load_file('b')\n"
    text += "def mix(t, a, b): return (1 - t) * a + t * b\nsave_file({k: mix(.5, A[k], B[k]) for k in A}, 'c')\n"
    assert planned({"a.py": text}).route == "model-averaging"


PICK = """import json, sys, threading
from trl import *
given = json.load(open("settings.json"))
def fit(kind, model):
    if kind == "sft":
        t = SFTTrainer(model=model)
    else:
        t = GRPOTrainer(model=model, reward_funcs=len)
    t.train()
    t.save_model(kind)
    return kind
def run(cls, model):
    t = cls(model=model)
    t.train()
    t.save_model("out")
    return "out"
"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("k = 'dpo'\nif k == 'sft': T = SFTTrainer\nelse: T = DPOTrainer\nT(model='m').train()\n", {"dpo"}),
        ("k = sys.argv[1]\nif k == 'sft': T = SFTTrainer\nelif k == 'dpo': T = DPOTrainer\nT('m').train()\n", {"dpo"}),
        ("match sys.argv[1]:\n  case 'sft': T = SFTTrainer\n  case _: T = DPOTrainer\nT('m').train()\n", {"dpo"}),
        ("match sys.argv[1]:\n  case 'dpo': T = DPOTrainer\n  case _: T = SFTTrainer\nT('m').train()\n", {"dpo"}),
        ("T = SFTTrainer\nif given['rl']: T = GRPOTrainer\nT('m').train()\n", {"sft", "grpo"}),
        ("t = (GRPOTrainer if given['rl'] else SFTTrainer)('m')\nt.train()\n", {"sft", "grpo"}),
        ("run(GRPOTrainer, run(SFTTrainer, 'base'))\n", {"sft+rl"}),
    ],
)
def test_the_class_is_the_one_that_was_picked(text: str, right: set[str]) -> None:
    told = planned({"a.py": PICK + text}, ["python a.py dpo"])
    assert {told.route.value, *(a.route.value for a in told.alternatives)} == right


@pytest.mark.parametrize(
    "loop",
    [
        "for k in ('sft', 'rl'): m = fit(k, m)\n",
        "S = ['sft', 'rl']\nfor k in S: m = fit(k, m)\n",
        "for i, k in enumerate(['sft', 'rl']): m = fit(k, m)\n",
        "for k, lr in (('sft', 1e-5), ('rl', 1e-6)): m = fit(k, m)\n",
        "for s in [{'kind': 'sft'}, {'kind': 'rl'}]: m = fit(s['kind'], m)\n",
    ],
)
def test_stages_in_a_loop_come_one_after_the_other(loop: str) -> None:
    assert planned({"a.py": PICK + "m = 'base'\n" + loop}).route == "sft+rl"


def test_classes_in_a_loop_both_run() -> None:
    told = planned({"a.py": PICK + "for T in (SFTTrainer, GRPOTrainer): m = run(T, m)\n"})
    assert {told.route.value, *(a.route.value for a in told.alternatives)} == {"sft", "grpo", "sft+rl"}


def test_a_loop_over_what_nobody_knows_leaves_it_open() -> None:
    told = planned({"a.py": PICK + "m = 'base'\nfor k in given['stages']: m = fit(k, m)\n"})
    assert {told.route.value, *(a.route.value for a in told.alternatives)} == {"sft", "grpo"}


@pytest.mark.parametrize(
    "runs",
    [
        "threading.Thread(target=t.train).start()",
        "ThreadPoolExecutor().submit(t.train).result()",
        "asyncio.run(asyncio.to_thread(t.train))",
        "notebook_launcher(t.train, num_processes=2)",
    ],
)
def test_a_trainer_that_is_handed_over_is_run(runs: str) -> None:
    text = "import asyncio, threading\nt = GRPOTrainer('m', reward_funcs=len)\n"
    assert planned({"a.py": "from trl import GRPOTrainer\n" + text + runs}).route == "grpo"


def test_samples_are_kept_by_whatever_is_compared_with_what_they_say() -> None:
    samples = """import json
from vllm import LLM
rows = LLM("b").generate(prompts)
with open("kept.jsonl", "w") as file:
    for row, a in zip(rows, known):
        for c in row.outputs:
            if extract(c.text) == a:
                file.write(json.dumps({"text": c.text}))
"""
    train = "from trl import SFTTrainer\nSFTTrainer('b', train_dataset=load('kept.jsonl')).train()\n"
    files = {"a.py": samples, "b.py": train}
    assert planned(files, ["python a.py", "python b.py"]).route == "rejection-sampling"
    files["a.py"] = samples.replace("extract(c.text) == a", "len(c.text) > 9")
    assert planned(files, ["python a.py", "python b.py"]).route == "sft"


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        (["cd code && python s.py"], "sft"),
        (["cd code && X=1 python s.py && python t.py > log 2>&1 &"], "sft+rl"),
        (["cd code; python t.py --lr 3 | tee log"], "grpo"),
        (["cd code && python s.py && python t.py", "python s.py", "python t.py"], "sft+rl"),
        (["python -c 'import t; t.x'"], "grpo"),
    ],
)
def test_lines_that_an_agent_gave_to_a_shell(lines: list[str], right: str) -> None:
    files = {
        "s.py": "from trl import *\nt = SFTTrainer('m')\nt.train()\nt.save_model('out/sft')\n",
        "t.py": "from trl import *\nGRPOTrainer('out/sft', reward_funcs=len).train()\n",
    }
    told = planned(files, lines)
    assert told.route == right and not told.alternatives


PAIR = """import torch
from transformers import AutoModelForCausalLM
a = AutoModelForCausalLM.from_pretrained("a")
b = AutoModelForCausalLM.from_pretrained("b")
sa, sb = a.state_dict(), b.state_dict()
"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("for k in sa: sa[k].mul_(0.5).add_(sb[k], alpha=0.5)\n", "model-averaging"),
        ("for p, q in zip(a.parameters(), b.parameters()): p.data.lerp_(q.data, 0.5)\n", "model-averaging"),
        ("for p, q in zip(a.parameters(), b.parameters()): p.data = 0.5 * p.data + 0.5 * q.data\n", "model-averaging"),
        ("for p, q in zip(a.parameters(), b.parameters()): p.data.copy_((p.data + q.data) / 2)\n", "model-averaging"),
        (
            "for (n, p), (_, q) in zip(a.named_parameters(), b.named_parameters()): p.data = (p.data + q.data) / 2\n",
            "model-averaging",
        ),
        ("for p, q in zip(a.parameters(), b.parameters()): p.data.copy_(q.data)\n", "unknown"),
        ("for p in a.parameters(): p.data.add_(torch.randn_like(p), alpha=1e-4)\n", "unknown"),
    ],
)
def test_two_models_side_by_side(text: str, right: str) -> None:
    assert planned({"a.py": PAIR + text + "a.load_state_dict(sa)\na.save_pretrained('out')\n"}).route == right

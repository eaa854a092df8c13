"""The commands as a person or a program calls them: what they refuse, and what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from helpers import PATIENCE_S

from autorl_hpc.files.layout import share

REPO = Path(__file__).resolve().parents[2]


def call(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `autorl-hpc` outside any checkout."""
    return warm.run(["-m", "autorl_hpc", *arguments], {**os.environ, **env}, cwd, PATIENCE_S)


# --- usage errors, for programs too ---

WRONG = [
    (["launch", "--json", "job.yaml", "--nope"], "--nope", "launch --help"),
    (["launch", "--json"], "Missing argument", "launch --help"),
    (["lunch", "--json"], "lunch", "--help"),
]


@pytest.mark.parametrize(("arguments", "words", "see"), WRONG)
def test_a_usage_error_is_json_where_json_is_asked_for(
    tmp_path: Path, arguments: list[str], words: str, see: str
) -> None:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    value = json.loads(done.stdout)
    assert words in value["error"] and value["exit_code"] == 2 and value["next"].endswith(see)
    assert words in done.stderr, "a person sees nothing"


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_a_message_quotes_of_a_file_steers_no_terminal(tmp_path: Path, as_json: list[str]) -> None:
    """Catches terminal escapes in an experiment, a file's name or an agent's definition that reach the terminal of who looks at it."""
    job = tmp_path / f"job{ESCAPES}.yaml"
    job.write_text(json.dumps({"name": f"a{ESCAPES}", f"field{ESCAPES}": 1}))
    done = call("launch", str(job), "--root", str(tmp_path / "root"), "--dry-run", *as_json, cwd=tmp_path)
    assert done.returncode == 2 and "owned" in done.stdout + done.stderr
    assert not set(ESCAPES) - set("]0;owned[2J31m") & set(done.stdout + done.stderr)


# --- --root ---


@pytest.mark.parametrize("command", [["launch", "jobs/quickstart.yaml"], ["quickstart"]])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, command: list[str]) -> None:
    place = tmp_path / "place"
    place.write_text("mine")
    done = call(*command, "--root", str(place / "deeper"), cwd=tmp_path)
    assert done.returncode == 2
    assert "--root is a file" in done.stderr and str(place) in done.stderr and "--again" not in done.stderr
    assert place.read_text() == "mine"


# --- the experiments that ship ---


@pytest.mark.parametrize("job", ["quickstart.yaml"])
def test_a_shipped_experiment_is_found_outside_a_checkout(staged: Path, tmp_path: Path, job: str) -> None:
    done = call("launch", job, "--dry-run", "--json", "--root", str(staged), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{job} is not here; using {share('jobs') / 'quickstart.yaml'}" in done.stderr
    json.loads(done.stdout)


def test_a_dry_run_shows_the_cap_on_submissions(staged: Path, tmp_path: Path) -> None:
    spec = yaml.safe_load((share("jobs") / "quickstart.yaml").read_text())
    spec["budget"]["max_submissions"] = 7
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec))
    shown = call("launch", "mine.yaml", "--dry-run", "--root", str(staged), cwd=tmp_path)
    assert shown.returncode == 0 and "at most 7 checkpoints of different content" in shown.stdout, shown.stderr


def test_a_wheel_ships_its_experiments(staged: Path, tmp_path: Path) -> None:
    """As pip lays it: package and shared parts in one folder, without a checkout."""
    place = tmp_path / "site"
    shutil.copytree(REPO / "autorl_hpc", place / "autorl_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("tasks", "templates", "jobs"):
        shutil.copytree(REPO / part, place / "autorl_hpc" / "_share" / part)
    done = call(
        "launch", "jobs/quickstart.yaml", "--dry-run", "--root", str(staged), cwd=tmp_path, PYTHONPATH=str(place)
    )
    assert done.returncode == 0, done.stderr
    assert f"using {place}" in done.stderr


@pytest.mark.parametrize("job", ["mine/quickstart.yaml"])
def test_another_file_that_is_not_there_is_not_replaced(staged: Path, tmp_path: Path, job: str) -> None:
    done = call("launch", job, "--dry-run", "--root", str(staged), cwd=tmp_path)
    assert done.returncode == 2 and "there is no such file" in done.stderr and job in done.stderr


@pytest.mark.parametrize("parallel", ["0"])
def test_a_wrong_number_of_agents_is_refused_before_anything_is_written(tmp_path: Path, parallel: str) -> None:
    done = call("quickstart", "--parallel", parallel, "--root", str(tmp_path / "place"), cwd=tmp_path)
    assert done.returncode == 2 and "--parallel" in done.stderr
    assert not (tmp_path / "place").exists()


# --- in a workspace ---

TOOLS = [("submit", "submit output/v1 --wait"), ("results", "results"), ("time", "time")]


@pytest.mark.parametrize(("tool", "example"), TOOLS)
def test_the_help_of_a_workspace_command_shows_its_name(tmp_path: Path, tool: str, example: str) -> None:
    done = call(tool, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"usage: autorl-hpc {tool} " in done.stdout and f"example: autorl-hpc {example}" in done.stdout
    assert "./" not in done.stdout


# --- bin/setup-env ---

STAND_IN = """#!/bin/sh
# A Python without torch, whose pip writes down what it is asked for; {fails} is what it can't find.
case "$*" in
  *"import torch"*) exit 1 ;;
  *pip*) echo "$*" >>"{log}"; case "$*" in {fails}) echo "no such version" >&2; exit 1 ;; esac ;;
esac
"""


@pytest.mark.parametrize(("fails", "installed"), [("nothing", ["cpu"]), ("*+cpu", ["cpu", "plain"])])
def test_the_cpu_build_of_torch_is_tried_first(tmp_path: Path, fails: str, installed: list[str]) -> None:
    log, python = tmp_path / "log", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(log=log, fails=fails))
    python.chmod(0o755)
    env = {**os.environ, "AUTORL_VENV": str(tmp_path / "venv"), "PYTHON": str(python)}
    done = subprocess.run(
        [str(REPO / "bin" / "setup-env"), "train"],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "no such version" not in done.stderr
    (pin,) = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    asked = [line.split()[-1] for line in log.read_text().splitlines()]
    assert asked[:-1] == [pin + {"cpu": "+cpu", "plain": ""}[build] for build in installed]
    assert asked[-1].endswith("[train]")


# --- the worked examples of gsm8k's second recipe ---

MAKE_SHOTS = [sys.executable, str(REPO / "bin" / "make-opencompass-4shot")]

CONFIG = """from nowhere.config import read_base
with read_base():
    from ..utils.utils import get_data_path
raise SystemExit("this file was run")

infer_cfg = dict(
    prompt_template=dict(
        type=PromptTemplate,
        template=dict(
            round=[
%s
            ],
        )),
    retriever=dict(type=ZeroRetriever),
    inferencer=dict(type=GenInferencer, max_out_len=%d))

datasets = [dict(abbr='x', path=get_data_path('x', './x'), infer_cfg=infer_cfg)]
"""


def config_of(messages: list[dict[str, str]], max_out_len: int) -> str:
    """A config that says these messages, in the shape of opencompass's."""
    roles = {"user": "HUMAN", "assistant": "BOT"}
    turns = [f"                dict(role={roles[m['role']]!r}, prompt={m['content']!r})," for m in messages]
    return CONFIG % ("\n".join(turns), max_out_len)


def make_shots(tmp_path: Path, config: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    path, out = tmp_path / "config.py", tmp_path / "out.json"
    path.write_text(config, encoding="utf-8")
    return subprocess.run([*MAKE_SHOTS, str(path), str(out)], capture_output=True, text=True, check=False), out


def test_the_pinned_worked_examples_are_made(tmp_path: Path, data: Path) -> None:
    pinned = data / "gsm8k" / "opencompass_4shot.json"
    value = json.loads(pinned.read_text(encoding="utf-8"))
    done, out = make_shots(tmp_path, config_of(value["messages"], value["max_out_len"]))
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == pinned.read_bytes()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("x = (", "it is no Python"),
        ("x = dict(max_out_len=1)", "`round=` stands 0 times"),
        ("x = dict(max_out_len=1, round=[dict(role='BOT', prompt=str(1))])", "line 1: `prompt=` is no text"),
    ],
)
def test_another_file_is_not_taken_for_the_config(tmp_path: Path, config: str, words: str) -> None:
    done, out = make_shots(tmp_path, config)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr and not out.exists()

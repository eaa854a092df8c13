"""docs/tutorial.md as one day: its commands and files, in its order, from the laptop with internet to the report, on a real Slurm.

What is not here is stood in for: the Hub by a server on the loopback, PyPI by a folder of wheels, `vllm` and its model's words by a script.
What takes hours is made small, by words of the page that are named below; all else is what the page says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import day_turns
import pytest
import yaml
from env_wheels import mini_wheels
from helpers import SLURM_PATIENCE_S
from miniparts import parts
from realdata import REPO
from slurm_world import PROFILE
from vllm_stand_in import make_program
from web_server import put_model, served

from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

parts()

PAGE = REPO / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRIVER = "Qwen/Qwen2.5-Coder-7B-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SMALL = {
    "stage SmolLM2-135M-Instruct": "stage tiny",
    "autorl/SmolLM2-135M-Instruct-dequantised": "autorl/tiny",
    "gsm8k": "arithmetic",
    " torch transformers trl accelerate peft datasets mini-swe-agent": " mini-swe-agent",
    "sft-grpo": "copycat",
    "seed: [0, 1, 2]": "seed: [0]",
    "wall_clock: 4h": "wall_clock: 20m",
    "reprompts: 2": "reprompts: 0",
    "gpus: 1, cpus: 8, memory: 80G": "gpus: 1, cpus: 1, memory: 1G",
}
"""Words of the page, and what stands for them here; in this order."""

INSTALLS = ("python3 -m venv venv", "pip install torch")
"""Lines that begin so need PyPI and a GPU's torch: the suite runs from this checkout instead."""

ENDLESS = "tail -f "

IN_A_SHELL = 'cd "$1"; eval "$2"; pwd > "$3"'


@dataclass
class Person:
    """Somebody at a shell, whose folder lasts from block to block."""

    here: Path
    env: dict[str, str]

    def does(self, block: str) -> str:
        """Runs a block of the page; its output."""
        at = self.here.parent / ".at"
        words = ["bash", "-euo", "pipefail", "-c", IN_A_SHELL, "-", str(self.here), block, str(at)]
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=SLURM_PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        self.here = Path(at.read_text().strip())
        return done.stdout + done.stderr


def small(text: str) -> str:
    """The page's words as they are run here."""
    for word, short in SMALL.items():
        text = text.replace(word, short)
    lines = [line for line in text.splitlines() if not line.startswith(INSTALLS)]
    ends = [f"timeout 2 {line} || [ $? = 124 ]" if line.startswith(ENDLESS) else line for line in lines]
    return "\n".join(ends) + "\n"


def sections() -> list[list[str]]:
    """Heading by heading: its blocks, made small."""
    page = PAGE.read_text(encoding="utf-8")
    for word in (*SMALL, *INSTALLS, ENDLESS):
        assert word in page, f"the page has no {word!r} any more"
    return [[small(text) for _, text in BLOCK.findall(part)] for part in page.split("\n## ")[1:]]


def tools(folder: Path) -> str:
    """A PATH on which `autorl-hpc` is this checkout."""
    folder.mkdir()
    for name, arguments in (("autorl-hpc", "-m autorl_hpc"), ("python3", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of somebody who has never used the suite."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AUTORL_", "HF_", "PIP_", "SLURM"))
    }
    (tmp_path / "home").mkdir()
    return {**kept, "PATH": tools(tmp_path / "tools"), "PYTHONPATH": str(REPO), "HOME": str(tmp_path / "home")}


@pytest.mark.soak
def test_the_day_of_the_tutorial(staged: Path, slurm: Sandbox, env: dict[str, str], tmp_path: Path) -> None:
    evening, nine, half_past_nine, ten, noon, six, thesis = sections()
    assert noon == thesis == [], "blocks that nobody runs"
    bundle, digest = the_evening(evening, staged, env, tmp_path)

    person = somebody_on_the_cluster(slurm, env, tmp_path)
    scratch = Path(person.env["SCRATCH"]) / "autorl"
    scratch.mkdir(parents=True)
    bundle.rename(scratch / bundle.name)
    at_nine(person, nine, digest)
    assert person.here == scratch

    spec, dry = half_past_nine
    (scratch / "jobs" / "day.yaml").write_text(spec)
    said = person.does(dry)
    assert "GPU-hours" in said and "job driver" in said
    assert not (scratch / "runs").exists(), "a dry run made something"
    assert "then `autorl-hpc launch jobs/quickstart.yaml --cluster mine`, is a rehearsal" in PAGE.read_text()
    person.does("autorl-hpc launch jobs/quickstart.yaml --cluster mine --dry-run")

    launch, looks = ten
    day = Root(scratch).experiment("day")
    try:
        person.does(launch)
        slurm.until(lambda: slurm.client("squeue", "--noheader").stdout, lambda queue: not queue)
    finally:
        slurm.client("scancel", f"--user={os.getuid()}")
    mini, script = sorted(json.loads(day.resolved.read_text())["runs"], key=lambda run: "-mini-" not in run)
    looked = person.does(looks.replace("RUN", mini))
    assert looked.count("Author:") >= 1, "the states of its code"
    assert_runs(day, mini, script)

    assert (day.report / "index.html").is_file()
    said = person.does(six[0].replace("RUN", mini))
    assert "never met" not in said, "the question of the day has an answer"
    assert said.count("anchored by the comment of Slurm job") == 3, said
    assert (scratch / "run.tar.zst").stat().st_size > 0


def the_evening(blocks: list[str], staged: Path, env: dict[str, str], tmp_path: Path) -> tuple[Path, str]:
    """Packs on a laptop, whose internet is here; the bundle, and its sha256 as it was told."""
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    (laptop / "autorl-hpc").symlink_to(REPO)
    wheels = mini_wheels(tmp_path / "wheels")
    with served() as hub:
        put_model(hub, DRIVER, model_files(staged, tmp_path / "hub"), COMMIT)
        internet = {"HF_ENDPOINT": hub.url(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        person = Person(laptop, {**env, **internet})
        (block,) = blocks
        said = person.does(block)
    (bundle,) = (laptop / "pack").glob("*.tar.zst")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert digest in said, said
    return bundle, digest


def model_files(staged: Path, folder: Path) -> Path:
    """The tiny model, as a repository of the Hub holds one."""
    folder.mkdir()
    for path in Root(staged).model("autorl/tiny").iterdir():
        if path.name != "MANIFEST.json":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def somebody_on_the_cluster(slurm: Sandbox, env: dict[str, str], tmp_path: Path) -> Person:
    """A login node without internet: what was installed the evening before, and the clone."""
    project = tmp_path / "project"
    activate = project / "venvs" / "autorl" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("# the suite is on PATH already\n")
    (project / "autorl-hpc").symlink_to(REPO)
    vllm = project / "venvs" / "vllm" / "bin"
    vllm.mkdir(parents=True)
    make_program(vllm, "day_turns")
    given = {"PROJECT": str(project), "SCRATCH": str(tmp_path / "scratch"), "SLURM_CONF": slurm.env["SLURM_CONF"]}
    timing = {"AUTORL_DRIVER_TIMING": "beat_s=0.2,users_s=0.5"}
    return Person(tmp_path / "home", {**env, **given, **timing})


def at_nine(person: Person, blocks: list[str], digest: str) -> None:
    """Unpacks, edits the profile for this Slurm, and asks the doctor."""
    unpack, lines, measure = blocks
    said = person.does(unpack)
    assert digest in said, "the copy is the bundle"
    profile = person.here / "jobs" / "clusters" / "mine.yaml"
    assert {"name", "partition", "account"} <= set(yaml.safe_load(profile.read_text()))
    profile.write_text(yaml.safe_dump({**PROFILE, "name": "mine", **yaml.safe_load(lines)}))
    assert "sandbox" in person.does(measure)


def assert_runs(day: ExperimentDir, mini: str, script: str) -> None:
    """Both are closed; the agent worked with its driver, in the environment that was packed, and has its score."""
    for run in (mini, script):
        view = RunView.of(Ledger(day.run(run)).read())
        assert view.sealed is not None and view.sealed.fault is None and view.closed is not None, view
        assert view.closed.selected_by in ("best_feedback", "base_kept") and view.accepted()
        environment = read_run(day.run(run)).environment
        assert environment is not None and environment.name == "train"
        if run == mini:
            use = view.sealed.driver
            assert use is not None and use.calls == day_turns.CALLS and use.tokens_in > 0
            assert view.score_of(view.accepted()[0]) is not None

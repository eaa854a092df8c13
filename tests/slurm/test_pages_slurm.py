"""docs/tutorial.md, docs/clusters.md and README's part on clusters as typed, from the laptop with internet to the report, on a real Slurm.

What is not here is stood in for: the Hub by a server on the loopback, PyPI by a folder of wheels, `vllm` and its model's words by a script.
What takes hours is made small, by words of the page that are named below; tests/pages.py lists what is not run, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import day_turns
import pytest
import yaml
from env_wheels import mini_wheels
from miniparts import parts
from pages import Person, newcomer
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

PAGE = "docs/tutorial.md"
DRIVER = "Qwen/Qwen2.5-Coder-7B-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SMALL: dict[str, str | Callable[[], str]] = {
    "stage SmolLM2-135M-Instruct": "stage tiny",
    "autorl/SmolLM2-135M-Instruct-dequantised": "autorl/tiny",
    "gsm8k": "arithmetic",
    " torch transformers trl accelerate peft datasets mini-swe-agent": " mini-swe-agent",
    "sft-grpo": "copycat",
    "seed: [0, 1, 2]": "seed: [0]",
    "wall_clock: 4h": "wall_clock: 20m",
    "reprompts: 2": "reprompts: 0",
}
"""Words of the page, and what stands for them here; in this order."""


def profile(person: Person, experiment: str) -> Callable[[], None]:
    """Return what somebody does after `init`: corrects the profile for this sandbox's small nodes; one small run is enough here."""

    def edit() -> None:
        path = person.here / "jobs" / "clusters" / "mine.yaml"
        made = yaml.safe_load(path.read_text())
        assert made["partition"] == "gpu", "init asks Slurm"
        path.write_text(yaml.safe_dump({**made, **PROFILE, "name": "mine"}))
        spec = person.here / "jobs" / f"{experiment}.yaml"
        given = yaml.safe_load(spec.read_text())
        given["matrix"] |= {"agent": "copycat", "seed": 0}
        given["grader"] = {"device": "cpu", "watch_every_s": 1, "idle_exit_s": 30}
        spec.write_text(yaml.safe_dump(given))

    return edit


def on_login_node(slurm: Sandbox, folder: Path) -> Person:
    """Return somebody with an account and the clone, whose shell finds this sandbox."""
    env = newcomer(folder / "me")
    project = folder / "project"
    project.mkdir()
    (folder / "autorl-hpc").symlink_to(REPO)
    (project / "autorl-hpc").symlink_to(REPO)
    given = {"PROJECT": str(project), "SCRATCH": str(folder / "scratch"), "SLURM_CONF": slurm.env["SLURM_CONF"]}
    env |= {**given, "AUTORL_DRIVER_TIMING": "beat_s=0.2,users_s=0.5"}
    return Person(folder, env, exits={"autorl-hpc doctor": 1})  # torch sees no GPU: they are fake


def wait_for_jobs(slurm: Sandbox) -> None:
    slurm.until(lambda: slurm.client("squeue", "--noheader").stdout, lambda queue: not queue)


def test_a_cluster_and_the_readme_as_typed(slurm: Sandbox, tmp_path: Path) -> None:
    person = on_login_node(slurm, tmp_path)
    person.after = {"autorl-hpc init": profile(person, "first"), "autorl-hpc status": lambda: wait_for_jobs(slurm)}
    try:
        person.follows("docs/clusters.md")
        first = Root(person.here).experiment("first")
        assert (first.report / "index.html").is_file()
        (person.here / "jobs" / "first.yaml").unlink()  # README's page begins with `init` again
        (person.here / "jobs" / "clusters" / "mine.yaml").unlink()
        person.follows("README.md", since="autorl-hpc init")
    finally:
        slurm.client("scancel", f"--user={os.getuid()}")
    for run in json.loads(first.resolved.read_text())["runs"]:
        view = RunView.of(Ledger(first.run(run)).read())
        assert view.closed is not None and view.sealed is not None and view.sealed.fault is None


def test_the_tutorial_has_the_words_that_are_made_small() -> None:
    """In the default tier: the day itself is long, and was broken unseen once."""
    text = (REPO / PAGE).read_text(encoding="utf-8")
    assert [word for word in SMALL if word not in text] == []


@pytest.mark.soak
def test_the_day_of_the_tutorial(staged: Path, slurm: Sandbox, tmp_path: Path) -> None:
    parts()
    text = (REPO / PAGE).read_text(encoding="utf-8")
    bundle, digest = the_evening(staged, tmp_path / "laptop")

    (tmp_path / "cluster").mkdir()
    person = on_login_node(slurm, tmp_path / "cluster")
    vllm = Path(person.env["PROJECT"]) / "venvs" / "vllm" / "bin"
    vllm.mkdir(parents=True)
    make_program(vllm, "day_turns")
    activate = Path(person.env["PROJECT"]) / "venvs" / "autorl" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("# the suite is on PATH already\n")
    scratch = Path(person.env["SCRATCH"]) / "autorl"
    scratch.mkdir(parents=True)
    bundle.rename(scratch / bundle.name)
    day = Root(scratch).experiment("day")

    def edit() -> None:
        profile(person, "rehearsal")()
        (lines,) = re.findall(r"^```yaml\n(vllm: .*?)^```$", text, re.DOTALL | re.MULTILINE)
        more = yaml.safe_load(lines.replace("gpus: 1, cpus: 8, memory: 80G", "gpus: 1, cpus: 1, memory: 1G"))
        path = scratch / "jobs" / "clusters" / "mine.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **more}))

    def mini() -> str:
        return "/" + next(path.name for path in day.path.glob("*-mini-*"))

    person.words = {**SMALL, "/RUN": mini}
    person.after = {"autorl-hpc init": edit, "autorl-hpc status": lambda: wait_for_jobs(slurm)}
    try:
        person.follows(PAGE, since="source $PROJECT")
    finally:
        slurm.client("scancel", f"--user={os.getuid()}")
    said = {line.split("#")[0].strip(): out for line, out in person.said.items()}
    assert digest in said["sha256sum day.tar.zst"], "the copy is the bundle"
    assert "GPU-hours" in said["autorl-hpc launch jobs/day.yaml --dry-run"]
    assert "Author:" in said["git -C runs/day/RUN/code.git log --stat"], "the states of its code"
    assert "never met" not in said["autorl-hpc report runs/ --compare mini sft-grpo"], "the question has an answer"
    assert said["autorl-hpc verify runs/day"].count("anchored by the comment of Slurm job") == 3
    assert (scratch / "run.tar.zst").stat().st_size > 0 and (scratch / "day-report" / "index.html").is_file()
    assert_runs(day)


def the_evening(staged: Path, laptop: Path) -> tuple[Path, str]:
    """Pack on a laptop, whose internet is here; return the bundle, and its sha256 as it was printed."""
    env = newcomer(laptop.parent / "owner")
    laptop.mkdir()
    (laptop / "autorl-hpc").symlink_to(REPO)
    wheels = mini_wheels(laptop.parent / "wheels")
    with served() as hub:
        put_model(hub, DRIVER, model_files(staged, laptop.parent / "hub"), COMMIT)
        internet = {"HF_ENDPOINT": hub.url(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        person = Person(laptop, {**env, **internet}, SMALL)
        person.follows(PAGE, until="source $PROJECT")
    (bundle,) = (laptop / "pack").glob("*.tar.zst")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert any(digest in out for line, out in person.said.items() if "--bundle" in line)
    return bundle, digest


def model_files(staged: Path, folder: Path) -> Path:
    """Lay the tiny model as a repository of the Hub holds one."""
    folder.mkdir()
    for path in Root(staged).model("autorl/tiny").iterdir():
        if path.name != "MANIFEST.json":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def assert_runs(day: ExperimentDir) -> None:
    """Both are closed; the agent worked with its driver, in the environment that was packed, and has its score."""
    runs: list[str] = json.loads(day.resolved.read_text())["runs"]
    assert len(runs) == 2
    for run in runs:
        view = RunView.of(Ledger(day.run(run)).read())
        assert view.sealed is not None and view.sealed.fault is None and view.closed is not None, view
        assert view.closed.selected_by in ("best_feedback", "base_kept") and view.accepted()
        environment = read_run(day.run(run)).environment
        assert environment is not None and environment.name == "train"
        if "-mini-" in run:
            use = view.sealed.driver
            assert use is not None and use.calls == day_turns.CALLS and use.tokens_in > 0
            assert view.score_of(view.accepted()[0]) is not None

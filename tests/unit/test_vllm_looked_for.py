"""Whether graders would find vLLM, told before anything is queued."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autorl_hpc.cluster.vllm import PROGRAM_VARIABLE, look_for_engine
from autorl_hpc.doctor import engine as doctors
from autorl_hpc.doctor.finding import State
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.launch import launcher
from autorl_hpc.launch.engine import lines, look_at_engine, refuse_without_engine
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec, GraderSpec
from autorl_hpc.stage.models import TINY, stage_model
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task


def an_environment(folder: Path, has_vllm: bool) -> Path:
    """A folder of programs: `vllm`, and a Python that has it or not."""
    folder.mkdir(parents=True)
    found = f"export PYTHONPATH={folder}" if has_vllm else "unset PYTHONPATH"
    (folder / "python3").write_text(f'#!/bin/sh\n{found}\nexec {sys.executable} -S "$@"\n')
    (folder / "vllm.py" if has_vllm else folder / "other.py").write_text("")
    (folder / "vllm").write_text("#!/bin/sh\n")
    for name in ("python3", "vllm"):
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM of the machine that tests."""
    monkeypatch.delenv(PROGRAM_VARIABLE, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin")


def test_by_the_rules_of_graders(tmp_path: Path) -> None:
    good, bad = an_environment(tmp_path / "good", True), an_environment(tmp_path / "bad", False)
    assert look_for_engine(None, "/nowhere").state == "problem"
    seen_here_alone = {**os.environ, "PYTHONPATH": str(good)}
    assert look_for_engine(None, "/nowhere", seen_here_alone).state == "problem", "jobs don't get PYTHONPATH"
    assert look_for_engine(None, str(good)).value == str(good / "python3")
    seen = look_for_engine(None, str(bad))
    assert seen.state == "problem" and "has no vLLM" in seen.value and PROGRAM_VARIABLE in seen.do_this
    named = {PROGRAM_VARIABLE: str(good / "vllm")}
    assert look_for_engine(None, str(bad), named).value == str(good / "python3"), "what is named comes first"
    profile = ClusterProfile(name="c", python=str(good / "python3"))
    assert look_for_engine(profile, "/nowhere").state == "ok", "the jobs' own Python has it"
    assert look_for_engine(profile, "/nowhere", {PROGRAM_VARIABLE: str(bad / "vllm")}).state == "problem"
    assert look_for_engine(ClusterProfile(name="c", vllm=str(tmp_path / "none")), str(good)).state == "problem"
    of_the_job = ClusterProfile(name="c", vllm="$SOME_SOFTWARE_OF_JOBS/vllm")
    assert look_for_engine(of_the_job, str(bad)).state == "note", "only jobs know"
    image = {"runtime": "apptainer", "image": "/x.sif"}
    assert look_for_engine(ClusterProfile.model_validate({"name": "c", "container": image}), "").state == "note"


def a_spec(engine: str) -> ExperimentSpec:
    grader = GraderSpec.model_validate({"engine": engine})
    return ExperimentSpec.model_construct(grader=grader)


def test_launch_refuses_and_the_doctor_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_engine(a_spec("transformers"), None) is None
    seen = look_at_engine(a_spec("vllm"), None)
    with pytest.raises(AutorlError, match=r"`grader\.engine`: `vllm` can't start: no Python with vLLM") as told:
        refuse_without_engine(seen, Path("job.yaml"))
    assert told.value.exit_code is Exit.ENVIRONMENT and "--unchecked" in str(told.value)
    assert lines(seen)[0].startswith("engine vllm: PROBLEM: ")
    (finding,) = doctors.everything(None)
    assert finding.state is State.NOTE and finding.so_what.endswith("is refused")
    good = an_environment(tmp_path / "good", True)
    monkeypatch.setenv("PATH", f"{good}:{os.environ['PATH']}")
    refuse_without_engine(look_at_engine(a_spec("vllm"), None), Path("job.yaml"))
    (finding,) = doctors.everything(None)
    assert finding.state is State.OK and finding.value == str(good / "python3")


def test_nothing_is_made_where_it_is_refused(staged: Path) -> None:
    root = Root(staged)
    with pytest.raises(AutorlError, match=r"`grader\.engine`"):
        launcher.prepare(staged / "exp.yaml", root)
    assert not root.experiment("exp").path.exists()
    _, record = launcher.prepare(staged / "exp.yaml", root, checked=False)
    assert record.grader.engine == "vllm" and root.experiment("exp").resolved.exists()


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A root with what an experiment needs, and the experiment's file."""
    root = Root(tmp_path)
    stage_model(root, TINY, None)
    stage_task(root, load_task("arithmetic"), None)
    (tmp_path / "exp.yaml").write_text(
        "name: exp\nmatrix: {task: arithmetic, agent: copycat, base_model: autorl/tiny}\nbudget: {wall_clock: 2m}\n"
        "grader: {engine: vllm}\n"
    )
    return tmp_path

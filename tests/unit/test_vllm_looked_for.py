"""Whether graders would find vLLM, told before anything is queued."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autorl_hpc.agents.program_check import where_agents_run
from autorl_hpc.cluster.vllm_program import PROGRAM_VARIABLE, VllmOnHost, look_for_engine
from autorl_hpc.doctor import host as doctors
from autorl_hpc.doctor.finding import State
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.launch.plan import finding_lines, look_at_engine, refuse_problems
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec, GraderSpec


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


def seen_by(profile: ClusterProfile | None, path: str, **variables: str) -> VllmOnHost:
    """What is seen from a host with these variables."""
    where = where_agents_run(profile, environ={**os.environ, "PATH": path, **variables})
    return look_for_engine(profile, where.environ, where.doubt)


def a_profile(**fields: object) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "c", **fields})


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM of the machine that tests."""
    monkeypatch.delenv(PROGRAM_VARIABLE, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin")


def test_by_the_rules_of_graders(tmp_path: Path) -> None:
    good, bad = an_environment(tmp_path / "good", True), an_environment(tmp_path / "bad", False)
    assert seen_by(None, "/nowhere").state == "problem"
    for profile in (None, a_profile(python=sys.executable)):
        seen = seen_by(profile, "/nowhere", PYTHONPATH=str(good))
        assert seen.state == "problem", "without modules and setup, jobs' PYTHONPATH is the frozen code alone"
    assert seen_by(None, str(good)).value == str(good / "python3")
    seen = seen_by(None, str(bad))
    assert seen.state == "problem" and "has no vLLM" in seen.value and PROGRAM_VARIABLE in seen.do_this
    named = {PROGRAM_VARIABLE: str(good / "vllm")}
    assert seen_by(None, str(bad), **named).value == str(good / "python3"), "what is named comes first"
    profile = a_profile(python=str(good / "python3"))
    assert seen_by(profile, "/nowhere").state == "ok", "the jobs' own Python has it"
    assert seen_by(profile, "/nowhere", **{PROGRAM_VARIABLE: str(bad / "vllm")}).state == "problem"
    assert seen_by(a_profile(vllm=str(tmp_path / "none")), str(good)).state == "problem"
    of_the_job = a_profile(vllm="$SOME_SOFTWARE_OF_JOBS/vllm")
    assert seen_by(of_the_job, str(bad)).state == "note", "only jobs know"
    assert seen_by(of_the_job, str(bad), SOME_SOFTWARE_OF_JOBS=str(good)).state == "ok"
    assert seen_by(a_profile(container={"runtime": "apptainer", "image": "/x.sif"}), "").state == "note"


def a_spec(engine: str) -> ExperimentSpec:
    grader = GraderSpec.model_validate({"engine": engine})
    return ExperimentSpec.model_construct(grader=grader)


def test_launch_refuses_and_the_doctor_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_engine(a_spec("transformers"), None) is None
    seen = look_at_engine(a_spec("vllm"), None)
    with pytest.raises(AutorlError, match=r"`grader\.engine`: `vllm` can't start: no Python with vLLM") as told:
        refuse_problems([], seen, Path("job.yaml"))
    assert told.value.exit_code is Exit.ENVIRONMENT and "--unchecked" in str(told.value)
    assert finding_lines([], seen)[0].startswith("engine vllm: PROBLEM: ")
    (finding,) = doctors.check_engine(None)
    assert finding.state is State.NOTE and finding.so_what.endswith("is refused")
    good = an_environment(tmp_path / "good", True)
    monkeypatch.setenv("PATH", f"{good}:{os.environ['PATH']}")
    refuse_problems([], look_at_engine(a_spec("vllm"), None), Path("job.yaml"))
    (finding,) = doctors.check_engine(None)
    assert finding.state is State.OK and finding.value == str(good / "python3")

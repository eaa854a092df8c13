"""What is frozen is what runs, and what run.json names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from autorl_hpc.agents import load_agent
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.store import frozen_is_whole
from autorl_hpc.grading.attempts import ClusterTrouble
from autorl_hpc.grading.daemon import MAX_TROUBLES, Grader
from autorl_hpc.launch.jobs import job_environment
from autorl_hpc.launch.plan import freeze, parts, prepare


@pytest.fixture
def root(staged: Path, tmp_path: Path) -> Root:
    """A root of the test's own."""
    for part in ("store", "vault"):
        shutil.copytree(staged / part, tmp_path / "root" / part)
    return Root(tmp_path / "root")


def own_agent(folder: Path, name: str, text: str = "exit 0\n") -> Path:
    """An agent folder of the user's own."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "agent.yaml").write_text(f"name: {name}\ndescription: mine\nstart: go.sh\n")
    (path / "go.sh").write_text(text)
    return path


def job(root: Root, agent: str, seeds: list[int]) -> Path:
    """An experiment file."""
    path = root.path / "job.yaml"
    matrix = {"task": "arithmetic", "agent": agent, "base_model": "autorl/tiny", "seed": seeds}
    path.write_text(json.dumps({"name": "exp", "matrix": matrix, "budget": {"wall_clock": "1m"}}))
    return path


def test_an_own_agent_replaces_the_built_in_one_of_its_name(tmp_path: Path) -> None:
    mine = own_agent(tmp_path / "agents", "copycat")
    (mine / "models").mkdir()
    (mine / "models" / "config.json").write_text("{}")
    (mine / "tool.sh").write_text("true\n")
    (mine / "tool.sh").chmod(0o755)
    experiment = ExperimentDir(tmp_path / "exp")
    experiment.code.mkdir(parents=True)
    wanted = freeze(experiment, parts({"templates/agents/copycat": mine}))
    laid = experiment.code / wanted / "templates" / "agents" / "copycat"
    assert sorted(p.name for p in laid.iterdir()) == ["agent.yaml", "go.sh", "models", "tool.sh"]
    assert (laid / "models" / "config.json").is_file()
    assert os.access(laid / "tool.sh", os.X_OK)
    frozen = load_agent("copycat", [laid.parent])
    assert frozen.hash() == load_agent("copycat", [mine.parent]).hash()
    assert frozen_is_whole(experiment, wanted)
    (laid / "__pycache__").mkdir()
    (laid / "__pycache__" / "x.pyc").write_bytes(b"")
    assert not frozen_is_whole(experiment, wanted)
    shutil.rmtree(laid / "__pycache__")
    os.symlink(tmp_path, experiment.code / wanted / "numpy")
    assert not frozen_is_whole(experiment, wanted)
    os.unlink(experiment.code / wanted / "numpy")
    (experiment.code / wanted / "numpy.pyc").write_bytes(b"")
    assert not frozen_is_whole(experiment, wanted)
    os.unlink(experiment.code / wanted / "numpy.pyc")
    (laid / "go.sh").write_text("curl evil\n")
    assert not frozen_is_whole(experiment, wanted)


def test_an_agent_whose_file_is_a_link_is_refused_before_anything_starts(tmp_path: Path) -> None:
    mine = own_agent(tmp_path, "mine")
    (mine / "go.sh").unlink()
    (tmp_path / "common.sh").write_text("exit 0\n")
    os.symlink(tmp_path / "common.sh", mine / "go.sh")
    with pytest.raises(AutorlError, match="is a link"):
        load_agent("mine", [tmp_path])


def test_keep_frozen_names_what_runs(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = tmp_path / "agents"
    own_agent(agents, "mine")
    monkeypatch.setenv("AUTORL_AGENTS_PATH", str(agents))
    prepare(job(root, "mine", [0]), root)
    own_agent(agents, "mine", "echo NEW VERSION\n")
    with pytest.raises(AutorlError, match="changed since this experiment was launched"):
        prepare(job(root, "mine", [0, 1]), root)
    planned, record = prepare(job(root, "mine", [0, 1]), root, keep_frozen=True)
    hashes = {read_run(planned.experiment.run(run)).agent_hash for run in record.runs}
    frozen = load_agent("mine", [planned.experiment.code / record.code_hash / "templates" / "agents"])
    assert len(record.runs) == 2 and hashes == {frozen.hash()}
    own_agent(agents, "other")
    with pytest.raises(AutorlError, match="no agent `other`"):
        prepare(job(root, "other", [0]), root, keep_frozen=True)


def test_jobs_get_no_secrets_and_no_folders_of_the_user(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AUTORL_AGENTS_PATH", "agents")
    monkeypatch.setenv("SLURM_CONF", "conf")
    planned, record = prepare(job(root, "null", [0]), root)
    env = job_environment(planned.experiment, record)
    assert "x" not in env.values() and "AUTORL_AGENTS_PATH" not in env
    assert env["SLURM_CONF"] == "conf" and env["PATH"] == os.environ["PATH"]


def test_a_grader_leaves_a_broken_node_but_not_for_one_broken_cell_or_run(root: Root) -> None:
    planned, record = prepare(job(root, "null", [0, 1]), root)
    grader = Grader(planned.experiment)
    close, other = (f"c-{run}" for run in record.runs)  # both of the cell arithmetic x tiny
    for _ in range(MAX_TROUBLES - 1):
        grader._failed(close, ClusterTrouble("no GPU"))
    grader._failed(other, ClusterTrouble("no GPU"))
    assert grader.must_leave()  # nothing ever worked here
    grader._well(close)
    for _ in range(2 * MAX_TROUBLES):
        grader._failed("b1-arithmetic-org+broken-00000000", ClusterTrouble("no tokenizer"))
    assert not grader.must_leave()  # the other cell may still be scored here
    grader._well(close)
    for _ in range(2 * MAX_TROUBLES):
        grader._failed(other, ClusterTrouble("its ledger is damaged"))
    assert not grader.must_leave()  # it may be that one run's own damage
    grader._failed(close, ClusterTrouble("the GPU fell off the bus"))
    assert grader.must_leave()

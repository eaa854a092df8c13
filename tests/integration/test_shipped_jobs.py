"""Experiments that ship go through `launch --dry-run` on a cluster's profile: everything but the size of tasks and models is theirs.

A task is dry-run as its small twin, which has the same shape: an environment, a judge, tests that are run. GSM8K's is arithmetic.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autorl_hpc import cli
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root, share
from autorl_hpc.launch.expand import expand, read_spec
from autorl_hpc.report.summary import read_paper
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

KEYS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY")
SECRET = "sk-of-the-tests-0123456789"
MINI = ("humaneval", "alpacaeval", "alfworld", "webshop", "deepsearchqa")
TWINS = {"gsm8k": "arithmetic", **{task: f"{task}-mini" for task in MINI}}
PROFILE = {
    "name": "mine",
    "partition": "gpu",
    "agent": {"gpus": 2, "cpus": 8, "memory": "64G"},
    "driver": {"gpus": 1, "cpus": 4, "memory": "32G"},
}


@pytest.fixture
def root(staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with the tiny task and model, and every key set."""
    made = Root(tmp_path / "root")
    for part in ("store", "vault"):
        shutil.copytree(staged / part, made.path / part)
    clusters = tmp_path / "clusters"
    clusters.mkdir()
    (clusters / "mine.yaml").write_text(yaml.safe_dump(PROFILE))
    monkeypatch.setenv("AUTORL_CLUSTERS_PATH", str(clusters))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # a Slurm on this host, with or without its daemons, is not asked
    (tmp_path / ".config" / "autorl-hpc").mkdir(parents=True)
    for name in KEYS:
        monkeypatch.setenv(name, SECRET)
    judge = judge_key(tmp_path)
    judge.write_text(SECRET)
    judge.chmod(0o600)
    return made


def judge_key(home: Path) -> Path:
    """Where shipped experiments look for it."""
    return home / ".config" / "autorl-hpc" / "judge.key"


def tiny(root: Root, name: str) -> None:
    """The tiny model, staged under another name."""
    folder = root.model(name)
    shutil.copytree(root.model("autorl/tiny"), folder)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    (folder / "MANIFEST.json").chmod(0o644)
    (folder / "MANIFEST.json").write_text(json.dumps({**manifest, "name": name}))


def dry_run(root: Root, job: str, *options: str, **changes: Any) -> tuple[dict[str, Any], str]:
    """Facts and words of a shipped experiment's dry run; its tasks are their twins, its models the tiny one under their names."""
    given = yaml.safe_load((share("jobs") / f"{job}.yaml").read_text())
    names = given["matrix"]["task"]
    for task in [names] if isinstance(names, str) else names:
        if task == "deepsearchqa":  # launch says what is missing, and where it comes from
            with pytest.raises(AutorlError, match="task deepsearchqa is not whole") as told:
                load_task(task)
            assert "complete.py" in str(told.value.next_step)
        else:
            assert load_task(task).name == task
    models = given["matrix"]["base_model"]
    served = [driver["model"] for driver in given.get("drivers", {}).values() if driver["kind"] == "vllm"]
    for model in ([models] if isinstance(models, str) else models) + served:
        tiny(root, model)
    twins = [TWINS[task] for task in ([names] if isinstance(names, str) else names)]
    for task in twins:
        if task != "arithmetic":  # staged already
            stage_task(root, load_task(task), None)
    given["matrix"]["task"] = twins
    path = root.path / f"{job}.yaml"
    path.write_text(yaml.safe_dump({**given, **changes}))
    said = []
    for form in ([], ["--json"]):
        done = CliRunner().invoke(
            cli.app, ["launch", str(path), "--dry-run", "--root", str(root.path), *options, *form]
        )
        assert done.exit_code == 0, done.output
        assert SECRET not in done.output
        said.append(done.stdout)
    assert not root.runs.exists(), "a dry run made something"
    facts: dict[str, Any] = json.loads(said[1])
    return facts, said[0]


def cells_of_the_paper() -> set[tuple[str, ...]]:
    """Agent, driver's model and base model of Table 2, by the names of this suite."""
    paper = read_paper()
    tables = [table for table in paper.tables if table.name.startswith("Table 2,")]
    cells = {
        (named("Codex" if row.agent == "Codex CLI" else row.agent), named(row.driver or ""), row.base_model)
        for table in tables
        for row in table.rows
        if row.driver is not None
    }
    assert len(tables) == 2 and len(cells) == 9
    return {(task, *cell) for task in paper.tasks for cell in cells}


def named(words: str) -> str:
    """`Claude Opus 4.6` as `claude-opus-4-6`, `gpt-5.4` as `gpt-5-4`."""
    return words.lower().replace(" ", "-").replace(".", "-")


def test_paper_matrix(root: Root) -> None:
    for package in ("sklearn", "snowballstemmer"):
        pytest.importorskip(package, reason="without the extras `alpacaeval` and `webshop`")
    facts, words = dry_run(root, "paper-matrix", "--cluster", "mine")
    path = root.path / "paper-matrix.yaml"
    spec = read_spec(path)
    models = {name: named(driver.model or "") for name, driver in spec.drivers.items()}
    tasks = {twin: task for task, twin in TWINS.items()}
    of_runs = [cell.science for cell in expand(spec, root, path)]
    cells = [(tasks[run.task], run.agent, models[run.driver], run.base_model, run.seed) for run in of_runs]
    assert {row["run_id"] for row in facts["runs"]} == {run.run_id() for run in of_runs}
    wanted = cells_of_the_paper()
    assert {cell[:-1] for cell in cells} == wanted, "the matrix is not Table 2's"
    assert sorted(cells) == sorted((*cell, seed) for cell in wanted for seed in (0, 1, 2))
    assert "driver gpt (api, gpt-5.4), 54 runs: costs at most 2,700.00 US dollars" in words
    assert facts["agent_gpu_hours"] == 162 * 12 * 2
    assert "graders ask the judge gpt-4.1 at api.openai.com" in words


def test_airgapped(root: Root) -> None:
    pytest.importorskip("minisweagent", reason="without the extra `mini`")
    facts, words = dry_run(root, "airgapped", "--cluster", "mine")
    (row,) = facts["drivers"]
    assert (row["tokens_at_most"], row["gpus"], row["gpu_hours"]) == (60_000_000, 2, 8.0)
    assert "at most 60,000,000 tokens; its job has 2 GPUs, about 8.0 GPU-hours while agents run" in words
    scripts = {job["role"]: job["script"] for job in facts["jobs"]}
    driver, agents = scripts["driver-coder"], scripts["agents"]
    assert "--gres=gpu:2" in driver and "job driver" in driver and driver.rstrip().endswith("coder")
    assert "<grader-0 link 1>" in agents and "<driver-coder link 1>" in agents, "agents wait for both"
    assert [job["role"] for job in facts["jobs"]].count("driver-coder") >= 3
    assert facts["sandbox"]["network"] == ["driver"]


def test_a_missing_key_and_an_open_key_file_are_told_before_anything_is_queued(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root.path / "keys.yaml"
    spec: dict[str, Any] = {
        "name": "keys",
        "matrix": {"task": "arithmetic", "agent": "null", "base_model": "autorl/tiny", "driver": "a"},
        "budget": {"wall_clock": "1h"},
    }
    key = tmp_path / "key"

    def refused(**driver: Any) -> str:
        api = {"kind": "api", "url": "https://api.example.org/v1", "model": "m", **driver}
        path.write_text(yaml.safe_dump({**spec, "drivers": {"a": api}}))
        done = CliRunner().invoke(cli.app, ["launch", str(path), "--root", str(root.path)])
        assert done.exit_code != 0 and not root.runs.exists()
        assert SECRET not in done.output + str(done.exception)
        return str(done.exception) + done.output

    assert "$NO_SUCH_KEY is not set" in refused(key_variable="NO_SUCH_KEY")
    assert "field `drivers.a.key_file`: the driver's key file can't be read" in refused(key_file=str(key))
    key.write_text(SECRET)
    key.chmod(0o644)
    assert "can be read by others" in refused(key_file=str(key))
    key.chmod(0o600)
    key.write_text(f"{SECRET} {SECRET}")
    assert "not a single line of visible characters" in refused(key_file=str(key))
    monkeypatch.setenv("TWO_LINES", f"{SECRET}\n{SECRET}")
    assert "field `drivers.a.key_variable`" in refused(key_variable="TWO_LINES")
    folder = tmp_path / "agents" / "asks"
    folder.mkdir(parents=True)
    (folder / "agent.yaml").write_text("name: asks\ndescription: d\nsecrets: [HF_TOKEN, OPENAI_API_KEY]\n")
    (folder / "start.sh").write_text("true\n")
    monkeypatch.setenv("AUTORL_AGENTS_PATH", str(folder.parent))
    spec["matrix"]["agent"] = ["null", "asks"]
    assert "agent asks would get the key of driver `a`: its `secrets` name OPENAI_API_KEY" in refused(
        key_variable="OPENAI_API_KEY"
    )
    assert "would need 4 GPUs, its job has 1" in refused(
        kind="vllm", model="autorl/tiny", url=None, gpus=1, tensor_parallel=2, args=["--pipeline-parallel-size=2"]
    )

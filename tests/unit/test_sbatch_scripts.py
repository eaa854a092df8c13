"""The scripts that sbatch gets: byte for byte as stored, and what they ask for.

After a wanted change, `AUTORL_RENEW_SCRIPTS=1 pytest tests/unit/test_sbatch_scripts.py` writes tests/unit/scripts/ anew (the tests
fail and say so); look at the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

import jobscripts
import plans
import pytest
from fakes import Clients
from jobscripts import CONTAINER, MODULES, PLAIN, of, one, options

from autorl_hpc.launch.jobs import job_environment
from autorl_hpc.launch.sbatch import Scripts, never_start

no_habits = jobscripts.no_habits

STORED = Path(__file__).parent / "scripts"
RENEW = "AUTORL_RENEW_SCRIPTS"

CASES = {
    "agents": lambda: one(of(PLAIN), "agents"),
    "agents-second-link": lambda: one(of({**PLAIN, "limits": {"max_time": "1h"}}, parallel=3), "agents", 2),
    "agents-throttled-second-link": lambda: one(of({**PLAIN, "limits": {"max_time": "1h"}}), "agents", 2),
    "grader": lambda: one(of(PLAIN), "grader-0"),
    "grader-later-link": lambda: one(of(PLAIN), "grader-0", 2),
    "report": lambda: one(of(PLAIN), "report"),
    "step": lambda: one(of(PLAIN, grader={"placement": "step"}), "agents"),
    "container": lambda: one(of(CONTAINER, scratch="/scratch/me"), "agents"),
    "modules": lambda: one(of(MODULES), "agents"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_stored_one(name: str) -> None:
    text = CASES[name]()
    path = STORED / f"{name}.sh"
    if os.environ.get(RENEW):
        STORED.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path.name} was written anew: look at the difference, then run without {RENEW}")
    assert text == path.read_text(), f"if this is wanted: {RENEW}=1 pytest {Path(__file__).name}"


# what is asked for


@pytest.mark.parametrize(
    ("wording", "kind", "expected"),
    [
        ("gres", "a100", {"gres": "gpu:a100:2"}),
        ("gres", None, {"gres": "gpu:2"}),
        ("gres", "1g.10gb", {"gres": "gpu:1g.10gb:2"}),
        ("gpus", "a100", {"gpus": "a100:2"}),
        ("gpus-per-node", None, {"gpus-per-node": "2"}),
        ("none", "a100", {}),
    ],
)
def test_how_gpus_are_asked_for(wording: str, kind: str | None, expected: dict[str, str]) -> None:
    asked = options(one(of({"gpu_wording": wording, "gpu_type": kind, "agent": {"gpus": 2}}), "agents"))
    assert {k: v for k, v in asked.items() if k in ("gres", "gpus", "gpus-per-node")} == expected


def test_a_kind_of_job_stands_above_the_profile() -> None:
    profile = {
        "partition": "gpu",
        "qos": "normal",
        "gpu_type": "a100",
        "reservation": "course",
        "sbatch": {"mail-type": "END", "exclusive": True, "nice": 5},
        "grader": {"partition": "short", "qos": "high", "gpu_type": "v100", "sbatch": {"exclusive": False, "nice": 7}},
    }
    grader, agents = (options(one(of(profile), role)) for role in ("grader-0", "agents"))
    picked = ("partition", "qos", "gres", "reservation", "mail-type", "exclusive", "nice")
    assert [agents.get(name) for name in picked] == ["gpu", "normal", "gpu:a100:1", "course", "END", "", "5"]
    assert [grader.get(name) for name in picked] == ["short", "high", "gpu:v100:1", "course", "END", None, "7"]


# a user's own defaults


@pytest.mark.parametrize("prefix", ["", "AUTORL_"])
@pytest.mark.parametrize("field", ["account", "partition", "qos"])
def test_a_users_default_stands_only_where_the_profile_is_silent(
    monkeypatch: pytest.MonkeyPatch, prefix: str, field: str
) -> None:
    monkeypatch.setenv(f"{prefix}SBATCH_{field.upper()}", "mine")
    assert options(one(of({}), "agents"))[field] == "mine"
    assert options(one(of({field: "theirs"}), "agents"))[field] == "theirs"
    assert options(one(of({"agent": {field: "theirs"}}), "agents"))[field] == "theirs"


# the environment in which they are submitted


SECRETS = ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "WANDB_APIKEY", "GOOGLE_CREDENTIALS"]
SECRETS += ["SSH_PASSPHRASE", "MY_JWT", "DEPLOY_KEY"]


def test_the_environment_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ["SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_ARRAY_TASK_ID", "SBATCH_EXPORT", "SBATCH_TIMELIMIT"]
    lost += ["SRUN_DEBUG", "SQUEUE_FORMAT", "SACCT_FORMAT", *SECRETS]
    kept = ["SLURM_CONF", "SLURM_CLUSTERS", "HTTPS_PROXY", "MY_SETTING"]
    for name in [*lost, *kept]:
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    for name in ("AUTORL_TASKS_PATH", "AUTORL_AGENTS_PATH"):
        monkeypatch.setenv(name, "/mine")
    record = of({})
    env = job_environment(plans.folder(record), record)
    assert not set(lost) & set(env)
    assert {name: env.get(name) for name in kept} == {name: f"value of {name}" for name in kept}
    assert "SBATCH_ACCOUNT" not in env and env["AUTORL_SBATCH_ACCOUNT"] == "mine"
    assert env["PYTHONPATH"] == f"/shared/autorl/runs/exp/code/{record.code_hash}"
    assert env["AUTORL_ROOT"] == "/shared/autorl"
    assert not {"AUTORL_TASKS_PATH", "AUTORL_AGENTS_PATH", "AUTORL_CUDA_VISIBLE_DEVICES"} & set(env)


def test_what_never_can_start_is_told_once_for_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch takes such jobs, and they wait for ever: `--test-only` says so."""
    clients = Clients(tmp_path, monkeypatch)
    refuses = "echo 'allocation failure: Requested partition configuration not available now' >&2; exit 1"
    clients.script("sbatch", f"if grep -q 'partition=gpu$'; then {refuses}; fi", "echo 'Job 7 to start' >&2")
    record = of({**PLAIN, "grader": {"partition": "cpu"}})
    assert record.cluster is not None
    made = Scripts(plans.folder(record), record, record.cluster, plans.UID)
    (told,) = never_start(plans.plan(record), made)
    assert told.startswith("WARNING: `agents` can't start on this cluster as it is: sbatch: Requested partition")
    assert {tuple(call) for call in clients.calls("sbatch")} == {("--parsable", "--test-only")}
    assert len(clients.calls("sbatch")) == 3  # agents, graders, report

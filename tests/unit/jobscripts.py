"""The scripts of an experiment's jobs, and a reading of their options as sbatch's own."""

from __future__ import annotations

import os
from typing import Any

import plans
import pytest

from autorl_hpc.cluster.profile import Site
from autorl_hpc.launch.jobs import JobPlan
from autorl_hpc.launch.sbatch import Scripts
from autorl_hpc.records.run import ExperimentRecord

PLAIN: dict[str, Any] = {
    "partition": "gpu",
    "account": "proj42",
    "gpu_type": "a100",
    "agent": {"gpus": 2, "cpus": 16, "memory": "64G"},
    "grader": {"gpus": 1, "cpus": 4, "memory": "32G"},
    "report": {"partition": "cpu"},
}
MODULES: dict[str, Any] = {
    **PLAIN,
    "gpu_wording": "gpus-per-node",
    "qos": "normal",
    "constraint": "a100|h100",
    "modules": ["cuda/12.4", "python/3.11.6"],
    "setup": "ulimit -c 0\nexport HF_HUB_OFFLINE=1 OMP_NUM_THREADS=8\n",
    "sbatch": {"mail-type": "END,FAIL", "licenses": "scratch:1", "exclusive": True},
    "python": "$HOME/my venv/bin/python",
    "requeue": False,
}
CONTAINER: dict[str, Any] = {
    **PLAIN,
    "gpu_wording": "none",
    "container": {
        "image": "$SHARED/images/autorl it's.sif",
        "options": ["--nv", "--bind=/opt/data set"],
        "python": "/opt/venv/bin/python",
    },
}


@pytest.fixture(autouse=True)
def no_habits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who runs the tests has in the environment."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "AUTORL_SBATCH_")):
            monkeypatch.delenv(name)


def scripts(record: ExperimentRecord, site: Site | None = None) -> list[tuple[JobPlan, str]]:
    """Every job with its script; job numbers are 101, 102, ..."""
    assert record.cluster is not None
    made = Scripts(plans.folder(record), record, record.cluster, plans.UID)
    jobs = plans.plan(record, site)
    numbers = {job.key: str(100 + job.submitted.number) for job in jobs}
    return [(job, made.text(job, numbers)) for job in jobs]


def one(record: ExperimentRecord, role: str, link: int = 1) -> str:
    """The script of one job."""
    return next(t for job, t in scripts(record) if (job.submitted.role, job.submitted.link) == (role, link))


def of(profile: dict[str, Any], runs: int = 3, **fields: Any) -> ExperimentRecord:
    return plans.experiment(runs, plans.profile(**profile), **{"parallel": 2, **fields})


def options(text: str) -> dict[str, str]:
    """The options of a script's head, by sbatch's own reading: a quote holds until the same one, a backslash escapes in quotes
    too, `#` ends a line outside them; reading ends at the first command."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("#SBATCH"):
            for argument in _arguments(line.removeprefix("#SBATCH")):
                name, _, value = argument.removeprefix("--").partition("=")
                assert name not in found, f"{name} stands twice"
                found[name] = value
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def _arguments(line: str) -> list[str]:
    found, word, quote, escaped, begun = [], "", "", False, False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = begun = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "\"'":
            quote, begun = char, True
        elif char == "#":
            break
        elif char.isspace():
            if word or begun:
                found.append(word)
            word, begun = "", False
        else:
            word += char
    assert not quote, f"a quote is open at the line's end: {line}"
    return [*found, *([word] if word or begun else [])]

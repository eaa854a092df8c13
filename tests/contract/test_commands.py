"""Commands as a user types them: options, exit codes, errors, scripts of jobs. What the schemas of records say."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract import HERE, REPO, Place

Check = Callable[[str, Any], None]
COMMANDS = "quickstart stage launch status report verify anchor export rescore doctor cancel attach"
EXPERIMENT: dict[str, Any] = {
    "name": "exp",
    "matrix": {"task": "arithmetic", "agent": "copycat", "base_model": "autorl/tiny"},
    "budget": {"wall_clock": "10m"},
}
group = pytest.mark.xdist_group("contract-commands")


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("staged"))
    done = place.run("stage", "arithmetic", "humaneval-mini", "tiny")
    assert done.returncode == 0, done.stderr
    return place


def job(place: Place, **changes: Any) -> Path:
    path = place.path / "exp.yaml"
    value = {**EXPERIMENT, **changes}
    path.write_text(yaml.safe_dump({key: each for key, each in value.items() if each is not None}))
    return path


@group
def test_commands_and_options(place: Place, check: Check) -> None:
    """No command and no option is lost."""
    found = {}
    for command in COMMANDS.split():
        done = place.run(command, "--help")
        assert done.returncode == 0
        found[command] = sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", done.stdout)))
    listed = place.run("--help").stdout.partition("Commands:")[2]
    check("commands.json", {"commands": sorted(re.findall(r"^  (\w+) ", listed, re.M)), "options": found})


MATRIX = EXPERIMENT["matrix"]
WRONG: dict[str, dict[str, Any]] = {
    "no matrix": {"matrix": None},
    "unknown field": {"budgets": {"wall_clock": "1h"}},
    "unknown field of a part": {"budget": {"wall_clock": "1h", "gpu": 3}},
    "unknown task": {"matrix": {**MATRIX, "task": "arithmetics"}},
    "unknown agent": {"matrix": {**MATRIX, "agent": "copycats"}},
    "unknown mode": {"matrix": {**MATRIX, "mode": "rl"}},
    "unknown driver": {"matrix": {**MATRIX, "driver": "gpt"}},
    "agent without its driver": {"matrix": {**MATRIX, "agent": "mini"}},
    "task not staged": {"matrix": {**MATRIX, "task": "gsm8k"}},
    "model not staged": {"matrix": {**MATRIX, "base_model": "autorl/other"}},
    "wrong budget": {"budget": {"wall_clock": "ten minutes"}},
    "negative budget": {"budget": {"wall_clock": "10m", "tokens": -1}},
    "wrong seed": {"matrix": {**MATRIX, "seed": -1}},
    "wrong name": {"name": "../exp"},
    "unknown cluster": {"cluster": "nowhere"},
    "unknown recipe": {"recipe": {"arithmetic": "other"}},
    "nothing left": {"exclude": [{"agent": "copycat"}]},
    "step on this machine": {"grader": {"placement": "step"}},
    "unknown environment": {"environment": "train"},
    "level that doesn't exist": {"sandbox": {"level": "jail"}},
}


@group
def test_wrong_experiments(staged: Place, check: Check) -> None:
    """Each mistake in an experiment's file: the exit code, and what, where, whose fault and what to do next."""
    found = {}
    for name, changes in WRONG.items():
        done = staged.run("launch", job(staged, **changes), "--json")
        found[name] = {"exit": done.returncode, **json.loads(done.stdout)}
    check("wrong-experiments.json", json.loads(staged.mask(json.dumps(found, ensure_ascii=False))))


@group
def test_wrong_use(staged: Place, check: Check) -> None:
    """Each wrong use of a command: the exit code and what is printed on stderr."""
    broken = staged.path / "broken.yaml"
    broken.write_text("name: exp\nmatrix: {task: [arithmetic\nbudget: 3\n")
    twice = staged.path / "twice.yaml"
    twice.write_text("name: exp\nname: other\n")
    (staged.path / "empty").mkdir(exist_ok=True)
    open_run = next(staged.unpack("interrupted").glob("*sparse*s0-*"))
    other = staged.path / "changed.yaml"
    other.write_bytes((open_run.parent / "experiment.yaml").read_bytes())
    uses: dict[str, tuple[str | Path, ...]] = {
        "no file": ("launch", "none.yaml"),
        "no YAML": ("launch", broken),
        "key twice": ("launch", twice),
        "no command": ("lunch",),
        "unknown option": ("status", "--jason", "empty"),
        "missing argument": ("verify",),
        "status of nothing": ("status", "empty"),
        "report of nothing": ("report", "empty"),
        "verify of nothing": ("verify", "empty"),
        "no folder": ("report", "none"),
        "anchors without a key": ("verify", "empty", "--anchors", "a"),
        "no head": ("verify", open_run.parent, "--expect", "abc"),
        "export of an open run": ("export", open_run),
        "no bundle": ("rescore", broken),
        "stage of an unknown thing": ("stage", "arithmetics"),
        "cancel of no experiment": ("cancel", "empty"),
        "cancel of no run": ("cancel", open_run.parent, "other"),
        "attach to a run without a shell": ("attach", open_run),
        "compare with nothing": ("report", open_run.parent, "--compare", "null", "nobody", "--no-figures"),
        "submit outside a workspace": ("submit", "output/v1"),
    }
    found = {}
    for name, use in uses.items():
        done = staged.run(*use)
        said = [line for line in staged.mask(done.stderr).splitlines() if not line.startswith(("Usage:", "Try "))]
        found[name] = {"exit": done.returncode, "stderr": said}
    check("wrong-use.json", found)


SCRIPTS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "quickstart": ("quickstart", "slurm-sandbox"),
    "quickstart-account": ("quickstart", "example-gres-account"),
    "quickstart-qos": ("quickstart", "example-gpus-qos"),
    "quickstart-container": ("quickstart", "example-airgapped-container"),
    "humaneval-here": ("humaneval-mini", "local"),
    "arrays": (
        {"matrix": {**MATRIX, "seed": list(range(60))}, "parallel": 7, "grader": {"count": 2, "chain": 2}},
        "example-airgapped-container",
    ),
    "long": ({"budget": {"wall_clock": "60h", "gpu_hours": 30}, "attempts": 5}, "slurm-sandbox"),
    "step": (
        {"grader": {"placement": "step"}, "resources": {"agent": {"gpus": 2, "cpus": 8, "memory": "64G"}}},
        "slurm-sandbox",
    ),
    "served-driver": (
        {
            "matrix": {**MATRIX, "agent": "mini", "driver": "own"},
            "drivers": {"own": {"kind": "vllm", "model": "autorl/tiny", "gpus": 2, "args": ["--max-num-seqs=32"]}},
            "budget": {"wall_clock": "1h", "tokens": 1000000},
            "reprompts": 1,
        },
        "slurm-sandbox",
    ),
}


@group
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(staged: Place, check: Check, name: str) -> None:
    """A dry run: the matrix, what it may cost, and every script that sbatch would get. It starts and writes nothing."""
    given, cluster = SCRIPTS[name]
    path = f"jobs/{given}.yaml" if isinstance(given, str) else str(job(staged, **given))
    (staged.path / "image.sif").touch()
    env = {"PROJECT": str(staged.path), "SCRATCH": str(staged.path / "scratch"), "AUTORL_VLLM": "/usr/bin/env"}
    before = sorted(staged.path.rglob("*"))
    done = staged.run("launch", path, "--cluster", cluster, "--dry-run", "--json", env=env)
    assert sorted(staged.path.rglob("*")) == before
    facts = json.loads(re.sub(r"code/[0-9a-f]{64}", "code/$HASH", staged.mask(done.stdout)))
    facts.pop("agents", None)  # whether their programs are installed here
    jobs = [{**each, "script": each.get("script", "").splitlines()} for each in facts["jobs"]]
    check(f"scripts/{name}.json", {"exit": done.returncode, **facts, "jobs": jobs})


def test_schemas(check: Check) -> None:
    """The published schema of each record, but for its words: fields, types, limits and defaults."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            words = ("description", "title") if isinstance(value.get("description", ""), str) else ()
            return {key: bare(each) for key, each in value.items() if key not in words or not isinstance(each, str)}
        return [bare(each) for each in value] if isinstance(value, list) else value

    files = sorted((REPO / "docs" / "schemas").glob("*.json"))
    texts = {path.stem: json.dumps(bare(json.loads(path.read_text())), sort_keys=True) for path in files}
    check("schemas.json", {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})


def test_the_contract_imports_nothing_of_the_package() -> None:
    """Else a move inside the package could change the contract with it."""
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] in ("autorl_hpc", "helpers") for name in names), path.name


def test_the_stored_experiments_are_small_and_of_no_machine() -> None:
    """At most 2 MiB together."""
    assert sum(path.stat().st_size for path in (HERE / "experiments").iterdir()) <= 2 * 1024 * 1024

"""The scripts that sbatch gets: byte for byte as stored, and closed to whatever stands in a profile.

After a wanted change, `AUTORL_RENEW_SCRIPTS=1 pytest tests/unit/test_sbatch_scripts.py` writes tests/unit/scripts/ anew (the tests
fail and say so); look at the difference before it is committed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import plans
import pytest

from autorl_hpc.cluster.site import Site
from autorl_hpc.errors import AutorlError
from autorl_hpc.launch.environment import job_environment
from autorl_hpc.launch.jobs import JobPlan
from autorl_hpc.launch.scripts import Scripts
from autorl_hpc.records.run import ExperimentRecord

STORED = Path(__file__).parent / "scripts"
RENEW = "AUTORL_RENEW_SCRIPTS"

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
def _no_habits(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_the_script(name: str) -> None:
    subprocess.run(["bash", "-n", str(STORED / f"{name}.sh")], check=True)


def test_no_stored_script_is_left_over() -> None:
    assert {path.stem for path in STORED.iterdir()} == set(CASES)


# reading a script as sbatch does


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


def test_what_an_agents_job_asks_for() -> None:
    assert options(one(of(PLAIN), "agents")) == {
        "account": "proj42",
        "array": "0-2%2",
        "comment": f"autorl-hpc {plans.UID} number 2",
        "cpus-per-task": "16",
        "dependency": "after:101",
        "gres": "gpu:a100:2",
        "job-name": f"exp.agents-2.{plans.UID}",
        "mem": "64G",
        "nodes": "1",
        "open-mode": "append",
        "output": "/shared/autorl/runs/exp/jobs/%A_%a_0_log.out",
        "partition": "gpu",
        "requeue": "",
        "signal": "B:USR2@90",
        "time": "102",
    }


def test_what_is_never_asked_for() -> None:
    """A wckey is refused by sites that track them; stderr goes where stdout goes."""
    for profile in (PLAIN, MODULES, CONTAINER):
        for _, text in scripts(of(profile)):
            asked = options(text)
            assert not {"wckey", "error", "ntasks-per-node", "export"} & set(asked)
            assert "srun" not in text and "submitit.core" not in text


def test_every_job_says_who_it_is() -> None:
    for job, text in scripts(of(PLAIN)):
        asked = options(text)
        assert asked["job-name"] == job.submitted.name
        assert asked["comment"] == f"autorl-hpc {plans.UID} number {job.submitted.number}"
        assert ("array" in asked) == bool(job.submitted.runs)


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


def test_no_gpus_no_word_of_them() -> None:
    assert "gres" not in options(one(of({"gpu_type": "a100", "agent": {"gpus": 0}}), "agents"))
    assert "gres" not in options(one(of(PLAIN), "report"))


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


def test_requeue_is_said_either_way() -> None:
    assert "requeue" in options(one(of({}), "agents"))
    asked = options(one(of({"requeue": False}), "agents"))
    assert "no-requeue" in asked and "requeue" not in asked


# nothing gets out of its place

AWKWARD = [
    "plain",
    "with space",
    "it's",
    'say "x"',
    "'; touch pwned; '",
    '"; touch pwned; "',
    "$(touch pwned)",
    "`touch pwned`",
    "${x:-$(touch pwned)}",
    "$[$(touch pwned)]",
    "$((x[$(touch pwned)]))",
    "a;touch pwned",
    "a&touch pwned",
    "a|touch pwned",
    "a>pwned",
    "# comment",
    "a #b",
    "--array=0-9",
    "x --dependency=never",
    "$HOME",
    "!x",
    "*",
    "~",
    "\u00fcml\u00e4ut \u2028 x",
]


@pytest.mark.parametrize("value", AWKWARD)
@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "reservation", "gpu_type", "licenses"])
def test_a_value_stays_in_its_option(field: str, value: str) -> None:
    given = {"sbatch": {"licenses": value}} if field == "licenses" else {field: value}
    plain = options(one(of({}), "agents"))
    asked = options(one(of(given), "agents"))
    name, expected = ("gres", f"gpu:{value}:1") if field == "gpu_type" else (field, value)
    assert asked == {**plain, name: expected}


@pytest.mark.parametrize("char", ["\n", "\r", "\t", "\x00", "\x1b", "\x7f"])
@pytest.mark.parametrize(
    "field", ["partition", "account", "gpu_type", "scratch", "python", "modules", "setup", "image", "licenses"]
)
def test_a_line_can_not_become_two(field: str, char: str) -> None:
    text = f"a{char}touch pwned"
    given: dict[str, Any] = {
        "modules": {"modules": [text]},
        "setup": {"setup": [text]},
        "image": {"container": {"image": text}},
        "licenses": {"sbatch": {"licenses": text}},
    }.get(field, {field: text})
    with pytest.raises(AutorlError, match="one line without control characters"):
        plans.profile(**given)


def test_a_backslash_in_an_option_is_refused() -> None:
    """sbatch takes it for an escape inside quotes too, so a value could end its quote."""
    with pytest.raises(AutorlError, match=r"field `account`: must not hold a backslash"):
        plans.profile(account="x\\' --array=0-5")
    with pytest.raises(AutorlError, match="must not hold a backslash"):
        plans.profile(sbatch={"licenses": "x\\"})


OURS = ["job-name", "comment", "array", "dependency", "output", "error", "open-mode", "parsable", "wait", "test-only"]


@pytest.mark.parametrize("name", [*OURS, "wrap", "cluster", "clusters", "quiet", "time-min"])
def test_an_option_that_the_suite_needs_can_not_be_changed(name: str) -> None:
    with pytest.raises(AutorlError, match=rf"field `agent\.sbatch`: `{name}` can't be changed"):
        plans.profile(agent={"sbatch": {name: "x"}})


@pytest.mark.parametrize(
    ("name", "field"),
    [("time", "time"), ("mem", "memory"), ("cpus-per-task", "cpus"), ("signal", "signal_before_end"), ("qos", "qos")],
)
def test_an_option_with_a_field_names_it(name: str, field: str) -> None:
    with pytest.raises(AutorlError, match=rf"`{name}` has a field of its own: `{field}`"):
        plans.profile(sbatch={name: "x"})


@pytest.mark.parametrize("name", ["Mail-Type", "mail_type", "-x", "a b", "a=b", "x\ny", "", "a;b"])
def test_an_options_name_is_a_name(name: str) -> None:
    with pytest.raises(AutorlError, match="field `sbatch"):
        plans.profile(sbatch={name: "x"})


SHOW = '#!/bin/bash\nprintf "%s\\0" "$PWD" "$PYTHONPATH" "$AUTORL_ROOT" "$SUBMITIT_EXECUTOR" "$0" "$@" > "$SHOWN"\n'


def run_script(text: str, tmp: Path, **env: str) -> list[str]:
    """What the program that a script starts sees: folder, variables, its path and arguments."""
    (tmp / "job.sh").write_text(text)
    shown = tmp / "shown"
    full = {"PATH": "/usr/bin:/bin", "HOME": str(tmp / "home"), "SHOWN": str(shown), **env}
    done = subprocess.run(["bash", str(tmp / "job.sh")], cwd=tmp, env=full, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp.rglob("pwned")), "something of the profile was run"
    return shown.read_text().split("\0")[:-1]


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SHOW)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("value", [value for value in AWKWARD if "$HOME" not in value and "/" not in value])
def test_a_python_and_a_root_are_taken_as_they_are_written(tmp_path: Path, value: str) -> None:
    root = tmp_path / f"root {value}"
    python = program(tmp_path / f"bin {value}" / "python")
    record = plans.experiment(1, plans.profile(python=python), root=str(root))
    here = plans.folder(record).path
    here.mkdir(parents=True)
    text = one(record, "agents")
    code = str(plans.folder(record).code / record.code_hash)
    experiment = str(plans.folder(record).path)
    assert run_script(text, tmp_path) == [
        *(str(here), code, str(root), "slurm", python),
        *("-m", "autorl_hpc", "job", "task", experiment, "2"),
    ]


@pytest.mark.parametrize("given", ["$BASE/bin/python", "${BASE}/bin/python", "~/bin/python", "$HOME/bin/python"])
def test_variables_and_home_are_those_of_the_job(tmp_path: Path, given: str) -> None:
    base = tmp_path / "home" if "~" in given or "HOME" in given else tmp_path / "a base"
    python = program(base / "bin" / "python")
    record = plans.experiment(1, plans.profile(python=given), root=str(tmp_path / "root"))
    plans.folder(record).path.mkdir(parents=True)
    assert run_script(one(record, "report"), tmp_path, BASE=str(tmp_path / "a base"))[4] == python


@pytest.mark.parametrize("value", [value for value in AWKWARD if "$HOME" not in value])
def test_a_container_gets_its_image_and_options_as_they_are_written(tmp_path: Path, value: str) -> None:
    runtime = program(tmp_path / "bin" / "apptainer")
    container = {"image": f"/images/{value}.sif", "options": ["--nv", value], "python": f"/opt/{value}"}
    cluster = plans.profile(container=container)
    record = plans.experiment(1, cluster, root=str(tmp_path / "root"), scratch=str(tmp_path / value))
    plans.folder(record).path.mkdir(parents=True)
    seen = run_script(one(record, "agents"), tmp_path, PATH=f"{Path(runtime).parent}:/usr/bin:/bin")
    binds = sorted({record.root, str(plans.folder(record).path), str(record.scratch)})
    assert seen[5:] == [
        *("exec", "--nv", value, *(f"--bind={folder}" for folder in binds), f"/images/{value}.sif"),
        *(f"/opt/{value}", "-m", "autorl_hpc", "job", "task", str(plans.folder(record).path), "2"),
    ]


@pytest.mark.parametrize("value", [value for value in AWKWARD if " " not in value])
def test_a_module_is_one_word_to_the_shell(tmp_path: Path, value: str) -> None:
    python = program(tmp_path / "bin" / "python")
    function = f"module() {{ printf '%s\\n' \"$@\" >> {shlex.quote(str(tmp_path / 'modules'))}; }}"
    (tmp_path / "env").write_text(function)
    record = plans.experiment(1, plans.profile(python=python, modules=[value]), root=str(tmp_path / "root"))
    plans.folder(record).path.mkdir(parents=True)
    run_script(one(record, "report"), tmp_path, BASH_ENV=str(tmp_path / "env"))
    assert (tmp_path / "modules").read_text() == f"load\n{value}\n"


def test_modules_on_one_line_are_several() -> None:
    text = one(of({"modules": "cuda/12.4 python/3.11"}), "agents")
    assert [line for line in text.splitlines() if line.startswith("module ")] == [
        "module load cuda/12.4",
        "module load python/3.11",
    ]


def test_packages_of_modules_come_after_the_frozen_code(tmp_path: Path) -> None:
    python = program(tmp_path / "bin" / "python")
    cluster = plans.profile(python=python, setup=["export PYTHONPATH=/site/packages"])
    record = plans.experiment(1, cluster, root=str(tmp_path / "root"))
    plans.folder(record).path.mkdir(parents=True)
    code = str(plans.folder(record).code / record.code_hash)
    assert run_script(one(record, "agents"), tmp_path)[1] == f"{code}:/site/packages"
    bare = plans.experiment(1, plans.profile(python=python), root=str(tmp_path / "root"))
    assert run_script(one(bare, "agents"), tmp_path, PYTHONPATH="/mine")[1] == code, "not what the submitting shell had"


def test_a_setup_line_is_bash_and_runs_before_the_payload(tmp_path: Path) -> None:
    python = program(tmp_path / "bin" / "python")
    setup = ["export SHOWN=$SHOWN", "cd /", "AUTORL_ROOT=wrong"]
    record = plans.experiment(1, plans.profile(python=python, setup=setup), root=str(tmp_path / "root"))
    here = plans.folder(record).path
    here.mkdir(parents=True)
    seen = run_script(one(record, "agents"), tmp_path)
    assert seen[0] == str(here) and seen[2] == record.root, "what the suite needs is set after them"


def test_a_warning_that_comes_before_the_payload_does_not_end_the_job(tmp_path: Path) -> None:
    """A preemption while modules are loaded: a job that ends by itself is not put back in line."""
    python = program(tmp_path / "bin" / "python")
    record = plans.experiment(1, plans.profile(python=python, setup="kill -USR2 $$"), root=str(tmp_path / "root"))
    plans.folder(record).path.mkdir(parents=True)
    assert run_script(one(record, "agents"), tmp_path)[4] == python


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


def test_other_defaults_of_sbatch_are_no_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = one(of({}), "agents")
    for name in ("SBATCH_TIMELIMIT", "SBATCH_CONSTRAINT", "SBATCH_GRES", "SBATCH_WCKEY", "SBATCH_RESERVATION"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SBATCH_ACCOUNT", "a\ntouch pwned")
    assert one(of({}), "agents") == plain


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


def test_stored_scripts_name_no_real_place() -> None:
    for path in STORED.iterdir():
        assert not re.search(r"/(home|root|work|tmp)/", path.read_text()), path.name

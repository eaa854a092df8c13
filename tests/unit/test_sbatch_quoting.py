"""Nothing that stands in a profile gets out of its place in a script, as bash and sbatch read it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import jobscripts
import plans
import pytest
from jobscripts import of, one, options

from autorl_hpc.errors import AutorlError

no_habits = jobscripts.no_habits

AWKWARD = [
    *[
        "plain",
        "with space",
        "it's",
        'say "x"',
        "'; touch pwned; '",
        '"; touch pwned; "',
        "$(touch pwned)",
        "`touch pwned`",
    ],
    *["${x:-$(touch pwned)}", "$[$(touch pwned)]", "$((x[$(touch pwned)]))", "a;touch pwned", "a&touch pwned"],
    *["a|touch pwned", "a>pwned", "# comment", "a #b", "--array=0-9", "x --dependency=never", "$HOME", "!x", "*", "~"],
    "\u00fcml\u00e4ut \u2028 x",
]


@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "reservation", "gpu_type", "licenses"])
def test_a_value_stays_in_its_option(field: str) -> None:
    plain = options(one(of({}), "agents"))
    for value in AWKWARD:
        given = {"sbatch": {"licenses": value}} if field == "licenses" else {field: value}
        name, expected = ("gres", f"gpu:{value}:1") if field == "gpu_type" else (field, value)
        assert options(one(of(given), "agents")) == {**plain, name: expected}


@pytest.mark.parametrize(
    "field", ["partition", "account", "gpu_type", "scratch", "python", "modules", "setup", "image", "licenses"]
)
def test_a_line_can_not_become_two(field: str) -> None:
    for char in ("\n", "\r", "\x00", "\x1b", "\x7f"):
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


def test_a_warning_that_comes_before_the_payload_does_not_end_the_job(tmp_path: Path) -> None:
    """A preemption while modules are loaded: a job that ends by itself is not put back in line."""
    python = program(tmp_path / "bin" / "python")
    record = plans.experiment(1, plans.profile(python=python, setup="kill -USR2 $$"), root=str(tmp_path / "root"))
    plans.folder(record).path.mkdir(parents=True)
    assert run_script(one(record, "agents"), tmp_path)[4] == python

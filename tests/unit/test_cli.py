"""The commands as a person or a program calls them: what they refuse, and what they say."""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import needs
import pytest
import warm
from helpers import PATIENCE_S

from autorl_hpc import cli, entry
from autorl_hpc.files.layout import share

REPO = Path(__file__).resolve().parents[2]


def call(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `autorl-hpc` outside any checkout."""
    return warm.run(["-m", "autorl_hpc", *arguments], {**os.environ, **env}, cwd, PATIENCE_S)


# --- usage errors, for programs too ---

WRONG = [
    (["launch", "--json", "job.yaml", "--nope"], "--nope", "launch --help"),
    (["launch", "--json"], "Missing argument", "launch --help"),
    (["lunch", "--json"], "lunch", "--help"),
]


@pytest.mark.parametrize(("arguments", "words", "see"), WRONG)
def test_a_usage_error_is_json_where_json_is_asked_for(
    tmp_path: Path, arguments: list[str], words: str, see: str
) -> None:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    value = json.loads(done.stdout)
    assert words in value["error"] and value["exit_code"] == 2 and value["next"].endswith(see)
    assert words in done.stderr, "a person sees nothing"


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_a_message_quotes_of_a_file_steers_no_terminal(tmp_path: Path, as_json: list[str]) -> None:
    """Catches terminal escapes in an experiment, a file's name or an agent's definition that reach the terminal of who looks at it."""
    job = tmp_path / f"job{ESCAPES}.yaml"
    job.write_text(json.dumps({"name": f"a{ESCAPES}", f"field{ESCAPES}": 1}))
    done = call("launch", str(job), "--root", str(tmp_path / "root"), "--dry-run", *as_json, cwd=tmp_path)
    assert done.returncode == 2 and "owned" in done.stdout + done.stderr
    assert not set(ESCAPES) - set("]0;owned[2J31m") & set(done.stdout + done.stderr)


# --- --root ---


@pytest.mark.parametrize("command", [["launch", "jobs/quickstart.yaml"], ["quickstart"]])
def test_a_root_that_is_a_file_is_named(tmp_path: Path, command: list[str]) -> None:
    place = tmp_path / "place"
    place.write_text("mine")
    done = call(*command, "--root", str(place / "deeper"), cwd=tmp_path)
    assert done.returncode == 2
    assert "--root is a file" in done.stderr and str(place) in done.stderr and "--again" not in done.stderr
    assert place.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["stage", "arithmetic", "--root", "PLACE"], "by --root"),
        (["launch", str(REPO / "jobs/quickstart.yaml"), "--root=PLACE"], "by --root"),
        (["status", "PLACE/runs/exp"], "in place of PLACE/runs/exp"),
        (["cancel", "PLACE/runs/exp"], "in place of PLACE/runs/exp"),
    ],
)
def test_a_denied_folder_says_whose_it_is_and_which_option_leads_there(
    monkeypatch: pytest.MonkeyPatch, command: list[str], option: str
) -> None:
    if os.getuid() != 0:
        needs.skip("root", "becoming another user")
    with tempfile.TemporaryDirectory() as name:  # closed to others
        words = [word.replace("PLACE", f"{name}/root") for word in command]
        left, right = multiprocessing.Pipe()

        def as_another() -> None:
            for module in ("launch.cancel", "launch.dry_run", "launch.start", "report.status", "stage.stage"):
                importlib.import_module(f"autorl_hpc.{module}")  # of files that the other user may not read
            os.chdir("/")
            os.setgid(65534)
            os.setuid(65534)
            sys.argv[:] = ["autorl-hpc", *words]
            sys.stderr = said = io.StringIO()
            code = entry.guarded(lambda: cli.app(words, standalone_mode=False))
            right.send((code, said.getvalue()))

        child = multiprocessing.get_context("fork").Process(target=as_another)
        child.start()
        right.close()
        code, said = left.recv()
        child.join()
    assert code == 3 and f"{name} belongs to root (drwx------)" in said, said
    assert f"or give another path {option.replace('PLACE', f'{name}/root')}" in said


# --- the experiments that ship ---


def test_a_shipped_experiment_is_found_outside_a_checkout_and_in_a_wheel(staged: Path, tmp_path: Path) -> None:
    """A wheel as pip lays it: package and shared parts in one folder, without a checkout."""
    place = tmp_path / "site"
    shutil.copytree(REPO / "autorl_hpc", place / "autorl_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("tasks", "templates", "jobs"):
        shutil.copytree(REPO / part, place / "autorl_hpc" / "_share" / part)
    for job, packages, where in (
        ("quickstart.yaml", {}, share("jobs")),
        ("jobs/quickstart.yaml", {"PYTHONPATH": str(place)}, place),
    ):
        done = call("launch", job, "--dry-run", "--json", "--root", str(staged), cwd=tmp_path, **packages)
        assert done.returncode == 0, done.stderr
        assert f"{job} is not here; using {where}" in done.stderr and json.loads(done.stdout)

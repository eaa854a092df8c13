"""Environments that agents train in: made of wheels without network, named by hash, used by a real agent."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from env_wheels import plain
from helpers import PATIENCE_S, Cluster

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import find_environment, present_hash, verify_environment
from autorl_hpc.launch.expand import run_environment
from autorl_hpc.stage import environments
from autorl_hpc.stage.sources import last_words
from autorl_hpc.stage.stage import stage
from autorl_hpc.states import Fault

AGENT = """#!/usr/bin/env bash
set -e
cd "$WORKSPACE"
python3 - > code/seen.json <<'END'
import json, os, shutil, sys
import greeting
json.dump({"prefix": sys.prefix, "text": greeting.TEXT, "path": os.environ["PATH"], "venv": os.environ["VIRTUAL_ENV"],
           "command": shutil.which("greet"), "suite": shutil.which("autorl-hpc")}, sys.stdout)
END
"""


def wheel(folder: Path, name: str, version: str, code: str, *, needs: str = "", command: bool = False) -> Path:
    """A wheel of one module, with a program `greet` if it has one."""
    program = {"@/entry_points.txt": f"[console_scripts]\ngreet = {name}:main\n"} if command else {}
    folder.mkdir(exist_ok=True)
    return plain(folder, name, version, {f"{name}.py": code, **program}, needs)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "fresh")
    made.path.mkdir()
    return made


def two_wheels(folder: Path) -> Path:
    """A folder of two wheels, one of which needs the other, and a file that asks for the one."""
    wheel(folder, "greeting", "1.0", "import helperlib\nTEXT = 'hello ' + helperlib.WHO\n\ndef main():\n    print(TEXT)\n", needs="helperlib>=1", command=True)  # fmt: skip
    wheel(folder, "helperlib", "1.2", "WHO = 'world'\n")
    (folder / "requirements.txt").write_text("greeting\n")
    return folder


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return two_wheels(tmp_path / "wheels")


def staged(root: Root, wheels: Path, *, again: bool = False) -> str:
    """Stages the environment and returns its content hash."""
    (value,) = stage(root, ["env:small"], source=wheels, requirements=wheels / "requirements.txt", again=again)
    assert not any(file["path"].startswith("venv/") for file in value["files"])
    return str(value["content_hash"])


def python(root: Root, digest: str, code: str) -> str:
    command = [str(root.environment("small", digest) / "venv" / "bin" / "python"), "-c", code]
    return subprocess.check_output(command, text=True, env={"PATH": os.environ["PATH"]}).strip()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, Path, str]:
    """A root with the environment, its wheels and its hash; tests leave them as they are."""
    root = Root(tmp_path_factory.mktemp("small"))
    wheels = two_wheels(root.path / "of-the-user")
    return root, wheels, staged(root, wheels)


def test_a_venv_is_made_of_its_wheels_and_named_by_their_hash(small: tuple[Root, Path, str], tmp_path: Path) -> None:
    root, wheels, digest = small
    folder, manifest = find_environment(root, "small")
    assert folder == root.environment("small", digest) and folder.name == f"small-{digest[:12]}"
    assert sorted(os.listdir(folder)) == ["MANIFEST.json", "requirements.lock", "venv", "wheels"]
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in wheels.glob("*.whl")}
    assert (folder / "requirements.lock").read_text().split() == [
        *("greeting==1.0", f"--hash=sha256:{sums['greeting-1.0-py3-none-any.whl']}"),
        *("helperlib==1.2", f"--hash=sha256:{sums['helperlib-1.2-py3-none-any.whl']}"),
    ]
    assert manifest.environment is not None and manifest.environment.python == environments.python_tag()
    shows = (
        "import greeting, sys; from importlib.util import find_spec; print(greeting.TEXT, sys.prefix, find_spec('pip'))"
    )
    assert python(root, digest, shows) == f"hello world {folder}/venv None"
    other = Root(tmp_path / "elsewhere")
    assert staged(other, wheels) == digest, "the hash depends on the place"
    assert not list(root.path.rglob(".tmp-small-*"))


def test_a_killed_staging_is_run_again_and_other_wheels_are_another_environment_beside_it(
    root: Root, wheels: Path
) -> None:
    child = os.fork()
    if child == 0:
        try:
            environments.store.write_manifest = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            staged(root, wheels)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    with pytest.raises(AutorlError, match="environment small is not staged"):
        verify_environment(root, "small")
    first = staged(root, wheels)
    assert not list(root.environments.glob(".tmp-small-*"))
    wheel(wheels, "helperlib", "1.3", "WHO = 'all'\n")
    assert staged(root, wheels) == first, "it is staged already"
    second = staged(root, wheels, again=True)
    assert second != first == verify_environment(root, "small", first).content_hash
    assert present_hash(root, "small") == second
    assert python(root, first, "import greeting; print(greeting.TEXT)") == "hello world"
    assert python(root, second, "import greeting; print(greeting.TEXT)") == "hello all"


def test_a_wheel_that_was_changed_beside_its_lock_file_is_refused(
    small: tuple[Root, Path, str], tmp_path: Path
) -> None:
    root, _, digest = small
    folder, house = root.environment("small", digest), tmp_path / "house"
    house.mkdir()
    for path in (*(folder / "wheels").iterdir(), folder / "requirements.lock"):
        (house / path.name).write_bytes(path.read_bytes())
    wheel(house, "helperlib", "1.2", "WHO = 'evil'\n")
    with pytest.raises(AutorlError, match=r"could not be gathered: .*DO NOT MATCH THE HASHES") as caught:
        stage(root, ["env:other"], source=house)
    assert caught.value.exit_code is Exit.USAGE and present_hash(root, "other") is None
    assert [p.name for p in root.environments.iterdir() if "other" in p.name and not p.name.endswith(".lock")] == []


def test_a_changed_venv_is_made_anew_and_an_altered_wheel_refused(root: Root, wheels: Path) -> None:
    digest = staged(root, wheels)
    site = next((root.environment("small", digest) / "venv" / "lib").glob("python*/site-packages"))
    for path in (site, site / "__pycache__", *site.glob("*.py"), *(site / "__pycache__").iterdir()):
        os.chmod(path, path.stat().st_mode | 0o200)
    target, compiled = site / "helperlib.py", next((site / "__pycache__").glob("helperlib.*"))

    def is_seen() -> None:
        with pytest.raises(AutorlError, match="field `environment`: ") as caught:
            run_environment(root, "small", root.path)
        assert "env:small --again" in (caught.value.next_step or "")

    for path in (target, compiled):
        original = path.read_bytes()
        path.write_bytes(original[:-1] + b"#")
        is_seen()
        path.write_bytes(original)
    (site / "sitecustomize.py").write_text("")
    is_seen()
    (site / "sitecustomize.py").unlink()
    assert run_environment(root, "small", root.path) is not None
    target.unlink()
    is_seen()
    target.symlink_to("/etc/passwd")
    is_seen()
    (value,) = stage(root, ["env:small"], again=True)  # out of its own wheels
    assert value["content_hash"] == digest
    found = run_environment(root, "small", root.path)
    assert found is not None and found.content_hash == digest
    assert python(root, digest, "import greeting; print(greeting.TEXT)") == "hello world"
    own = root.environment("small", digest) / "wheels"
    os.chmod(own, 0o755)
    path = own / "helperlib-1.2-py3-none-any.whl"
    os.chmod(path, 0o644)
    wheel(own, "helperlib", "1.2", "WHO = 'evil'\n")
    with pytest.raises(AutorlError, match="staged w") as caught:
        stage(root, ["env:small"])
    assert caught.value.where == str(path) and caught.value.exit_code is Exit.FAILED
    with pytest.raises(AutorlError, match=r"could not be gathered: .*DO NOT MATCH THE HASHES"):
        stage(root, ["env:small"], again=True)


def test_an_environment_in_a_bundle(small: tuple[Root, Path, str], tmp_path: Path) -> None:
    root, _, digest = small
    out = tmp_path / "b.tar.zst"
    stage(root, ["env:small"], bundle=out)
    other = Root(tmp_path / "other")
    other.path.mkdir()
    lines: list[str] = []
    stage(other, [], source=out, say=lines.append)
    assert present_hash(other, "small") == digest
    assert python(other, digest, "import greeting; print(greeting.TEXT)") == "hello world"
    stage(other, [], source=out, say=lines.append)
    assert lines[-2:] == ["env:small: the same content is there already", f"env:small: content {digest}"]


@pytest.mark.parametrize(("text", "words"), [("greeting==9\n", "greeting==9"), ("?!\n", "could not be gathered")])
def test_requirements_that_can_not_be_met(root: Root, wheels: Path, text: str, words: str) -> None:
    (wheels / "requirements.txt").write_text(text)
    with pytest.raises(AutorlError, match="the wheels of env:small could not be gathered") as caught:
        staged(root, wheels)
    assert words in caught.value.what and caught.value.next_step
    assert [p.name for p in root.environments.iterdir() if not p.name.endswith(".lock")] == []


def test_passwords_of_an_index_stand_in_no_message() -> None:
    line = "ERROR: no way to https://me:secret@index.invalid/simple and http://token@host/x"
    assert last_words(f"{line}\nmore") == "no way to https://index.invalid/simple and http://host/x"


def test_what_an_environment_is_made_of_must_be_said(root: Root, tmp_path: Path) -> None:
    with pytest.raises(AutorlError, match="what environment x is made of is not known") as caught:
        stage(root, ["env:x"])
    assert "--requirements FILE" in (caught.value.next_step or "")
    with pytest.raises(AutorlError, match="No such file"):
        stage(root, ["env:x"], requirements=tmp_path / "none.txt")
    with pytest.raises(AutorlError, match="--requirements is for environments"):
        stage(root, ["tiny"], requirements=tmp_path / "none.txt")
    with pytest.raises(AutorlError, match="field `environment`: environment x is not staged"):
        run_environment(root, "x", root.path)


# --- images ---


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "agents.sif"
    path.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"x" * 5000)
    return path


def test_an_image_is_named_by_its_hash_and_needs_level_apptainer(root: Root, image: Path, tmp_path: Path) -> None:
    (value,) = stage(root, ["env:box"], source=image)
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    assert value["content_hash"] == digest and value["environment"]["kind"] == "image"
    assert (root.environment("box", digest) / "image.sif").read_bytes() == image.read_bytes()
    found = run_environment(root, "box", tmp_path / "exp.yaml")
    assert found is not None and (found.kind, found.content_hash) == ("image", digest)
    with pytest.raises(AutorlError, match="box is an image, which runs at level apptainer and not at bwrap"):
        run_environment(root, "box", tmp_path / "exp.yaml", "bwrap")
    out = tmp_path / "b.tar"
    stage(root, ["env:box"], bundle=out)
    other = Root(tmp_path / "other")
    stage(other, [], source=out)
    assert verify_environment(other, "box").content_hash == digest


# --- agents ---


def test_an_agent_runs_in_the_environment_of_its_experiment_one_that_is_gone_is_the_clusters_fault_another_one_another_run(
    cluster: Cluster, wheels: Path
) -> None:
    requirements = str(wheels / "requirements.txt")
    cluster.run("stage", "env:small", "--from", str(wheels), "--requirements", requirements)
    digest = present_hash(cluster.root, "small")
    assert digest is not None
    cluster.agent("looks", AGENT, needs=["greeting"])
    run_id, later = cluster.prepare(["looks"], environment="small", attempts=1, matrix={"seed": [0, 1]})
    record = json.loads(cluster.run_dir(run_id).record.read_text())
    assert record["environment"] == {"name": "small", "kind": "venv", "content_hash": digest}
    assert record["science"]["environment_hash"] == digest
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    log = cluster.run_dir(run_id).agent_log.read_text()
    seen = json.loads((cluster.workspace(run_id) / "code" / "seen.json").read_text() or "{}")
    venv = cluster.root.environment("small", digest) / "venv"
    assert seen["prefix"] == seen["venv"] == str(venv), log
    assert seen["text"] == "hello world" and seen["command"] == str(venv / "bin" / "greet")
    assert seen["path"].split(os.pathsep)[0] == str(venv / "bin")
    if sys.prefix != sys.base_prefix:
        assert str(Path(sys.executable).parent) not in seen["path"].split(os.pathsep)
    os.rename(venv.parent, cluster.root.path / "moved")
    assert cluster.supervisor(later).wait(PATIENCE_S) == 0
    sealed = cluster.view(later).sealed
    assert sealed is not None and sealed.fault is Fault.CLUSTER
    assert "environment small is not staged" in str(sealed.reason)
    os.rename(cluster.root.path / "moved", venv.parent)
    wheel(wheels, "helperlib", "1.3", "WHO = 'all'\n")
    cluster.run("stage", "env:small", "--from", str(wheels), "--requirements", requirements, "--again")
    seeds = {"seed": [0, 1]}
    others = set(cluster.prepare(["looks"], environment="small", attempts=1, matrix=seeds)) - {run_id, later}
    assert len(others) == 2, "another environment is another run"
    cluster.agent("needy", AGENT, needs=["pydantic"])  # which the suite has, and the environment has not
    spec = cluster.spec(["needy"], environment="small")
    done = cluster.run("launch", str(spec), "--dry-run", check=False)
    assert done.returncode == Exit.ENVIRONMENT
    assert "needs the Python package pydantic, which environment small doesn't have" in done.stderr

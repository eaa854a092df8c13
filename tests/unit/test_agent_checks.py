"""An agent's program before anything is queued: is it on the PATH of jobs, does the sandbox show it, which version is it?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.agents import Agent, AgentFile
from autorl_hpc.agents.program_check import Looked, look, where_agents_run
from autorl_hpc.doctor import host
from autorl_hpc.records.cluster import ClusterProfile


def program(path: Path, body: str = "echo 'prog 1.2.3 (of tests)'", first: str = "#!/bin/sh") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first}\n{body}\n")
    path.chmod(0o755)
    return path


def agent(tmp: Path, check: str | None = None, **fields: object) -> Agent:
    folder = tmp / "agents" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    if check is not None:
        (folder / "check.sh").write_text(check)
        fields["check"] = "check.sh"
    value = {"name": "mine", "description": "d", "program": ["prog", "--version"], "install": "npm it", **fields}
    return Agent(folder, AgentFile.model_validate(value))


def seen(tmp: Path, made: Agent, *readable: str, path: str | None = None, **kind: object) -> Looked:
    environ = {**os.environ, "PATH": f"{tmp}/p/bin:/usr/bin:/bin" if path is None else path}
    return look(made, where_agents_run(None, readable, environ=environ, **kind), environ)[-1]  # type: ignore[arg-type]


def test_doctor_shows_which_variables_of_jobs_agents_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "agent_names", tuple)
    names = ["NCCL_*", "GLOO_SOCKET_IFNAME", "SITE_TOKEN"]
    setup = [
        "export NCCL_IB_HCA=mlx5_0:1 NCCL_DEBUG=WARN",
        "export SITE_TOKEN=s3cret",
        "export GLOO_SOCKET_IFNAME=$(hostname)",
    ]
    profile = ClusterProfile.model_validate({"name": "site", "agent_variables": names, "setup": setup})
    shown = [found for found in host.check_agents(profile, tmp_path) if found.check == "variables of jobs"]
    assert [found.value for found in shown] == [
        "NCCL_DEBUG=WARN, NCCL_IB_HCA=mlx5_0:1",
        "not set: GLOO_SOCKET_IFNAME, SITE_TOKEN",
    ]


def test_a_version_that_is_known_to_work(tmp_path: Path) -> None:
    program(tmp_path / "p" / "bin" / "prog")
    looked = seen(tmp_path, agent(tmp_path, versions="1.2.3"))
    assert looked.state == "ok" and "version 1.2.3, known to work" in looked.value
    other = seen(tmp_path, agent(tmp_path, versions=["1.2.2", "1.2.30"]))
    assert other.state == "note" and "version 1.2.3; known to work: 1.2.2, 1.2.30" in other.value
    assert "no version of it was tested" in seen(tmp_path, agent(tmp_path)).value


def test_a_program_that_is_nowhere(tmp_path: Path) -> None:
    assert "must be in the image" in seen(tmp_path, agent(tmp_path), image=True).value
    looked = seen(tmp_path, agent(tmp_path))
    assert looked.state == "problem" and looked.value == "prog is not on the PATH of jobs"
    assert looked.do_this.endswith("npm it")


def test_a_program_in_a_home_that_the_sandbox_hides(tmp_path: Path) -> None:
    """~/.local/bin/prog -> ~/.local/share/prog/1.2.3, where installers put programs; level none hides nothing."""
    real = program(tmp_path / "home" / "share" / "prog" / "1.2.3")
    (tmp_path / "p" / "bin").mkdir(parents=True)
    (tmp_path / "p" / "bin" / "prog").symlink_to(real)
    looked = seen(tmp_path, agent(tmp_path))
    assert looked.state == "problem" and f"hides {real}, to which {tmp_path}/p/bin/prog leads" in looked.value
    assert "sandbox.readable" in looked.do_this
    assert seen(tmp_path, agent(tmp_path), str(real.parent)).state == "note"
    assert seen(tmp_path, agent(tmp_path), level="none").state == "note"


def test_programs_and_checks_get_an_empty_home_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    check = 'ls -A "$HOME"; env | grep sk-secret; echo "$MODE"; exit 1\n'
    program(tmp_path / "p" / "bin" / "prog")
    looked = seen(tmp_path, agent(tmp_path, check, env={"MODE": "of the definition"}))
    assert looked.state == "problem" and looked.value == "of the definition"


REACHES = """cat {root}/vault/items > {out} 2> /dev/null; cat {root}/vault/items; touch {out}; exit 1
"""


@pytest.mark.parametrize("by", ["check", "program", "env"])
def test_what_a_definition_brings_runs_without_the_vault(tmp_path: Path, by: str) -> None:
    """Catches a check, a program or a variable of an agent's folder that reaches the vault as soon as somebody looks at it, as by
    `launch --dry-run`. The held-out item must come back by no way: what is said, or a file outside."""
    root, out = tmp_path / "root", tmp_path / "out"
    (root / "vault").mkdir(parents=True)
    (root / "vault" / "items").write_text("the held-out answer")
    program(tmp_path / "p" / "bin" / "prog")
    reaches = REACHES.format(root=root, out=out)
    (root / "agents" / "mine").mkdir(parents=True)
    (root / "agents" / "mine" / "reach.sh").write_text(reaches)
    script = str(root / "agents" / "mine" / "reach.sh")
    given: dict[str, dict[str, object]] = {
        "check": {"check": reaches},
        "program": {"program": ["bash", script]},
        "env": {"env": {"BASH_ENV": script}, "check": "exit 1\n"},
    }
    made = agent(root, **given[by])  # type: ignore[arg-type]
    where = where_agents_run(None, environ={**os.environ, "PATH": f"{tmp_path}/p/bin:/usr/bin:/bin"})
    looked = look(made, where, hidden=(root,))
    assert looked[-1].state == "problem" and not out.exists(), "it ran, and outside of a sandbox"
    assert "held-out answer" not in str(looked)

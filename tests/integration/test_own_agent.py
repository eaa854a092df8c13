"""docs/adding-an-agent.md as written: its files, its option, its variable, launches; and what is refused before anything is queued."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from driver_server import DriverServer, Turn
from helpers import Cluster

DOC = Path(__file__).resolve().parents[2] / "docs" / "adding-an-agent.md"


def lay(agents: Path, prefix: str, name: str) -> Path:
    """The page's files below `prefix` as the agent's folder."""
    text = DOC.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"`" + prefix + r"([a-z.]+)`\n\n```[a-z]+\n(.*?)```", text, re.DOTALL))
    folder = agents / name
    folder.mkdir(parents=True)
    for file, body in blocks.items():
        (folder / file).write_text(body)
    return folder


def test_the_agent_of_the_docs_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lay(tmp_path / "agents", "", "mine")
    assert sorted(path.name for path in folder.iterdir()) == ["agent.yaml", "start.sh"]
    monkeypatch.setenv("AUTORL_AGENTS_PATH", str(folder.parent))
    job = cluster.spec(["mine"])
    cluster.run("launch", str(job), "--root", str(cluster.root.path), "--dry-run")
    cluster.run("launch", str(job), "--root", str(cluster.root.path))
    shutil.rmtree(folder)  # frozen: the jobs don't need it any more
    cluster.run("status", str(cluster.experiment.path), "--watch")
    (run_id,) = [name.name for name in cluster.experiment.path.iterdir() if name.name.startswith("arithmetic-mine")]
    view = cluster.view(run_id)
    assert view.closed is not None and view.closed.selected == 1
    assert view.submissions[1].is_base
    assert "whole" in cluster.run("verify", str(cluster.experiment.path)).stdout


def test_the_agent_with_a_driver_of_the_docs_runs(cluster: Cluster, tmp_path: Path) -> None:
    folder = lay(tmp_path / "agents", "asker/", "asker")
    key = tmp_path / "key"
    key.write_text("the-real-key-of-the-provider")
    key.chmod(0o600)
    cluster.mini_task()
    with DriverServer([Turn("Use a small learning rate.")], key=key.read_text(), model="scripted") as server:
        job = cluster.spec(
            ["asker"],
            matrix={"task": "mini", "driver": "llm"},
            drivers={"llm": {"kind": "api", "url": server.url, "model": "scripted", "key_file": str(key)}},
            reprompts=1,
        )
        own = ("--agents", str(folder.parent), "--root", str(cluster.root.path))
        dry = cluster.run("launch", str(job), *own, "--dry-run").stdout
        assert "agent asker: note: " in dry and "no version of it was tested" in dry
        cluster.run("launch", str(job), *own)
        cluster.run("status", str(cluster.experiment.path), "--watch")
        first, second = (conversation.text for conversation in server.conversations)
    (run_id,) = [path.name for path in cluster.experiment.path.iterdir() if path.name.startswith("mini-asker")]
    assert cluster.view(run_id).closed is not None and len(cluster.view(run_id).accepted()) == 1
    assert "improve the base model" in first and "as you left it" in second
    advice = (cluster.workspace(run_id) / "code" / "advice.txt").read_text()
    assert advice == "Use a small learning rate.\n" * 2


def test_variables_of_a_definition_reach_no_program_outside_the_sandbox(cluster: Cluster, tmp_path: Path) -> None:
    """LD_PRELOAD would load the agent's own code into what makes its sandbox. LD_DEBUG tells which programs got such a variable."""
    folder = tmp_path / "agents" / "mine"
    folder.mkdir(parents=True)
    variables = "{LD_DEBUG: files, LD_DEBUG_OUTPUT: ./output/ld, TASK: mine, OWN: 'a b=c', EMPTY: }"
    (folder / "config.yaml").write_text(f"name: x\nenv_vars: {variables}\n")
    (folder / "start.sh").write_text('echo "$TASK,$OWN,${EMPTY-unset}" > output/said; exit 3\n')
    cluster.mini_task()
    job = cluster.spec(["mine"], matrix={"task": "mini"}, sandbox={"level": "auto"})
    cluster.run("launch", str(job), "--agents", str(folder.parent), "--root", str(cluster.root.path))
    cluster.run("status", str(cluster.experiment.path), "--watch")
    (run_id,) = [path.name for path in cluster.experiment.path.iterdir() if path.name.startswith("mini-mine")]
    output = cluster.workspace(run_id) / "output"
    assert (output / "said").read_text() == "mini,a b=c,\n"
    told = "".join(path.read_text() for path in output.glob("ld.*"))
    assert {Path(name).name for name in re.findall(r"initialize program: (\S+)", told)} == {"bash"}


def test_an_agent_that_is_nowhere_is_named_with_the_way_out(cluster: Cluster) -> None:
    done = cluster.run("launch", str(cluster.spec(["mine"])), "--root", str(cluster.root.path), check=False)
    assert done.returncode == 2
    assert "no agent `mine`" in done.stderr and "--agents or $AUTORL_AGENTS_PATH" in done.stderr


def test_nothing_is_made_for_an_agent_that_can_not_run(cluster: Cluster, tmp_path: Path) -> None:
    """A dry run only tells; what is on the nodes alone can be launched all the same."""
    folder = lay(tmp_path / "agents", "", "mine")
    (folder / "agent.yaml").write_text(
        "name: mine\ndescription: d\nprogram: [no-such-program, --version]\ninstall: see its page\n"
    )
    job = cluster.spec(["mine"])
    own = ("--agents", str(folder.parent), "--root", str(cluster.root.path))
    assert "PROBLEM: no-such-program is not on the PATH" in cluster.run("launch", str(job), *own, "--dry-run").stdout
    done = cluster.run("launch", str(job), *own, check=False)
    assert done.returncode == 3 and "agent mine can't run" in done.stderr and "see its page" in done.stderr
    assert not cluster.experiment.path.exists()
    cluster.run("launch", str(job), *own, "--unchecked")
    cluster.run("cancel", str(cluster.experiment.path))


def test_an_agent_that_needs_a_driver_is_not_paired_with_none(cluster: Cluster) -> None:
    done = cluster.run("launch", str(cluster.spec(["codex"])), "--root", str(cluster.root.path), check=False)
    assert done.returncode == 2
    assert "agent codex calls a driver (by openai-responses)" in done.stderr and "exclude:" in done.stderr

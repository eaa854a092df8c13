"""The agents of docs/adding-an-agent.md: by variable and option, frozen, with a driver; and what is refused before anything is queued."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from driver_server import DriverServer, Turn
from helpers import Cluster
from pages import blocks
from realdata import REPO


def lay(agents: Path, name: str) -> Path:
    """Lay the page's first agent into its folder."""
    folder = agents / name
    folder.mkdir(parents=True)
    for block in blocks("docs/adding-an-agent.md"):
        if block.name.startswith("~/agents/mine/"):
            (folder / Path(block.name).name).write_text(block.text)
    return folder


def test_agents_of_ones_own_run_as_the_docs_say(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the variable and by the option, frozen, prompted again, driven; AutoRL-Bench's config.yaml with its variables.

    LD_PRELOAD of a definition would load the agent's code into what makes its sandbox: LD_DEBUG tells who got such a variable.
    """
    folder = lay(tmp_path / "by-variable", "mine")
    assert sorted(path.name for path in folder.iterdir()) == ["agent.yaml", "start.sh"]
    monkeypatch.setenv("AUTORL_AGENTS_PATH", str(folder.parent))
    agents = tmp_path / "by-option"
    shutil.copytree(REPO / "docs" / "examples" / "agents", agents)
    (agents / "plain").mkdir()
    variables = "{LD_DEBUG: files, LD_DEBUG_OUTPUT: ./output/ld, TASK: mine, OWN: 'a b=c', EMPTY: }"
    (agents / "plain" / "config.yaml").write_text(f"name: x\nenv_vars: {variables}\n")
    (agents / "plain" / "start.sh").write_text('echo "$TASK,$OWN,${EMPTY-unset}" > output/said; exit 3\n')
    key = tmp_path / "key"
    key.write_text("the-real-key-of-the-provider")
    key.chmod(0o600)
    cluster.mini_task()
    own = ("--agents", str(agents), "--root", str(cluster.root.path))
    with DriverServer([Turn("Use a small learning rate.")], key=key.read_text(), model="scripted") as server:
        job = cluster.spec(
            ["mine", "asker", "plain"],
            matrix={"task": "mini", "driver": "llm"},
            drivers={"llm": {"kind": "api", "url": server.url, "model": "scripted", "key_file": str(key)}},
            reprompts=1,
            sandbox={"level": "auto"},
        )
        dry = cluster.run("launch", str(job), *own, "--dry-run").stdout
        assert "agent asker: note: " in dry and "no version of it was tested" in dry
        cluster.run("launch", str(job), *own)
        shutil.rmtree(folder)  # frozen: the jobs don't need it any more
        cluster.run("status", str(cluster.experiment.path), "--watch")
        first, second = (conversation.text for conversation in server.conversations)
    names = [path.name for path in cluster.experiment.path.iterdir()]
    mine, asker, plain = (next(n for n in names if n.startswith(f"mini-{a}-")) for a in ("mine", "asker", "plain"))
    view = cluster.view(mine)
    assert view.closed is not None and view.closed.selected == 1 and view.submissions[1].is_base
    assert cluster.view(asker).closed is not None and len(cluster.view(asker).accepted()) == 1
    assert "improve the base model" in first and "as you left it" in second
    advice = (cluster.workspace(asker) / "code" / "advice.txt").read_text()
    assert advice == "Use a small learning rate.\n" * 2
    output = cluster.workspace(plain) / "output"
    assert (output / "said").read_text() == "mini,a b=c,\n"
    told = "".join(path.read_text() for path in output.glob("ld.*"))
    assert {Path(name).name for name in re.findall(r"initialize program: (\S+)", told)} == {"bash"}
    assert "whole" in cluster.run("verify", str(cluster.experiment.path)).stdout


def test_nothing_is_made_for_an_agent_that_can_not_run(cluster: Cluster, tmp_path: Path) -> None:
    """A dry run only tells; what is on the nodes alone can be launched all the same."""
    folder = lay(tmp_path / "agents", "mine")
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


def test_an_agent_that_includes_the_vault_is_not_launched(staged: Path, tmp_path: Path) -> None:
    """Catches a folder of agents that is the root itself: `include: [vault]` took the held-out items into a workspace."""
    cluster = Cluster(staged, tmp_path)
    mine = cluster.root.path / "mine"
    mine.mkdir()
    (mine / "agent.yaml").write_text("name: mine\ndescription: d\ninclude: [vault]\n")
    (mine / "start.sh").write_text("true\n")
    (mine / "start.sh").chmod(0o755)
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: one\nmatrix: {task: [arithmetic], base_model: [autorl/tiny], agent: [mine]}\nbudget: {wall_clock: 30s}\n"
    )
    where = ("--agents", str(cluster.root.path), "--root", str(cluster.root.path))
    for form in ((), ("--dry-run",)):
        done = cluster.run("launch", str(job), *where, *form, check=False)
        assert done.returncode != 0 and "holds the vault" in done.stderr, done.stdout + done.stderr

"""mini in a staged environment that holds what docs/mini.md says it imports, and nothing of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from driver_server import Conversation, DriverServer, Turn
from env_wheels import mini_wheels
from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for
from ministory import KEY, experiment
from miniturns import DONE, say

from autorl_hpc.errors import Exit
from autorl_hpc.files.store import present_hash
from autorl_hpc.states import EndedBy

LOOKS = """\
python3 -c 'import minisweagent, sys; print("prefix", sys.prefix); import torch'
cat /proc/[0-9]*/maps 2>/dev/null | grep -ao '/[^ ]*_pydantic_core[^ ]*' | sort -u"""


def turn(conversation: Conversation) -> Turn:
    """It looks where it is, submits, and ends."""
    return [say(LOOKS), say(VARIANTS + "variants 0 1; ./submit output/v0 --wait"), say(DONE)][conversation.turns]


def stage(cluster: Cluster, wheels: Path, name: str, asked: str) -> Path:
    """An environment of these requirements; its venv."""
    requirements = wheels / f"{name}.txt"
    requirements.write_text(asked)
    cluster.run("stage", f"env:{name}", "--from", str(wheels), "--requirements", str(requirements))
    return cluster.root.environment(name, str(present_hash(cluster.root, name))) / "venv"


@pytest.mark.timeout(1500)
def test_mini_works_in_an_environment_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    wheels = mini_wheels(tmp_path / "wheels")
    venv = stage(cluster, wheels, "small", "mini-swe-agent==2.4.6\n")
    cluster.mini_task()
    stage(cluster, wheels, "other", "jinja2\n")
    with DriverServer(turn, key=KEY, model="scripted") as driver:
        given = {**experiment(driver, tmp_path), "reprompts": 0}
        refused = cluster.run(
            "launch", str(cluster.spec(["mini"], environment="other", **given)), "--dry-run", check=False
        )
        assert refused.returncode == Exit.ENVIRONMENT and "minisweagent, which environment other" in refused.stderr
        cluster.run("launch", str(cluster.spec(["mini"], environment="small", **given)), "--dry-run")
        (run_id,) = cluster.prepare(["mini"], environment="small", **given)
        cluster.grader()
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), "the run's end")
    looked, scored = driver.conversations[1].last, driver.conversations[2].last
    assert f"prefix {venv}\n" in looked and "No module named 'torch'" in looked, looked
    loaded = [line for line in looked.splitlines() if "_pydantic_core" in line]
    assert loaded and all(line.startswith(f"{venv}/") for line in loaded), looked
    assert '"status": "scored"' in scored, scored
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.AGENT_EXIT and sealed.exit_codes == (0,)
    events = [json.loads(line) for line in (cluster.run_dir(run_id).recorded("events")).read_text().splitlines()]
    assert any(event["event"] == "agent_version" and "2.4.6" in json.dumps(event) for event in events), events

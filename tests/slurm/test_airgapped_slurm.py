"""A cluster without internet, on the real Slurm: `jobs/airgapped.yaml` from launch to report, its driver killed while it answers.

The program `vllm` is a stand-in; all else is what a user has: the shipped experiment, made small, through `launch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import airgap_turns
import pytest
import yaml
from miniparts import parts
from slurm_world import World
from vllm_stand_in import make_program

from autorl_hpc.files.layout import share
from autorl_hpc.files.store import read_endpoint, read_key
from autorl_hpc.states import EndedBy, Network, SandboxLevel

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

parts()

NAME = "coder"
CALLS = airgap_turns.HELD_TURN + 2
"""Answers that come to the agent. The one that dies with its server is none of them."""


def small(here: World) -> None:
    """The shipped experiment with a small task, the tiny model for both, and jobs that this sandbox's nodes hold: one run of it."""
    given = yaml.safe_load((share("jobs") / "airgapped.yaml").read_text())
    given["drivers"][NAME] |= {"model": "autorl/tiny", "gpus": 1, "cpus": 1, "memory": "1G"}
    given["matrix"] |= {"task": "mini", "base_model": "autorl/tiny", "seed": [0]}
    given["budget"] |= {"wall_clock": "20m"}
    given["grader"] = {"device": "cpu", "watch_every_s": 1, "stale_after_s": 3, "idle_exit_s": 900}
    changes = {"name": "exp", "cluster": "test", "reprompts": 0}
    (here.root.path / "exp.yaml").write_text(yaml.safe_dump({**given, **changes}))


def turns(folder: Path) -> list[dict[str, Any]]:
    """What the driver's servers wrote of themselves, line by line."""
    path = folder / "turns.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def holding(folder: Path, text: str) -> list[str]:
    """Files below a folder that hold the text."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                found.append(str(path.relative_to(folder)))
        except FileNotFoundError:
            continue  # written and renamed meanwhile
    return found


@pytest.mark.soak
def test_mini_and_a_driver_of_the_cluster_from_launch_to_report(
    world: Callable[..., World], slurm: Sandbox, tmp_path: Path
) -> None:
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    here = world(slurm, driver={"gpus": 1, "cpus": 1, "memory": "1G"}, vllm=str(make_program(stand_in, "airgap_turns")))
    here.more_env = {"AUTORL_DRIVER_TIMING": "beat_s=0.2,users_s=0.5"}
    small(here)
    key_file = here.experiment.driver_key(NAME)
    (stand_in / "key-path").write_text(str(key_file))
    (stand_in / "holds").touch()

    here.launch()
    (run,) = here.runs
    key = read_key(key_file)
    here.until(lambda: any(each["held"] for each in turns(stand_in)), "the driver to be asked after the first score")
    first = read_endpoint(here.experiment.driver_endpoint(NAME))
    assert first is not None and first.job_id == here.job_of(f"driver-{NAME}")
    assert holding(here.root.path, key) == [str(key_file.relative_to(here.root.path))]
    (stand_in / "holds").unlink()
    with here.recovery("a driver's job killed while it answers"):
        slurm.client("scancel", "--signal=KILL", "--full", first.job_id)
        here.until(lambda: len({each["server"] for each in turns(stand_in)}) > 1, "its successor to be asked")
    here.wait_over()

    here.assert_whole()
    assert_run(here, run, turns(stand_in))
    assert_nothing_left(here, key)
    assert first.generation < assert_ended(here)


def assert_run(here: World, run: str, said: list[dict[str, Any]]) -> None:
    """Sandboxed, scored twice, counted by the gateway; what the agent pried for it did not get."""
    log = here.run_dir(run).agent_log.read_text()
    view = here.view(run)
    sealed = view.sealed
    assert sealed is not None and sealed.ended_by is EndedBy.AGENT_EXIT and sealed.fault is None, log[-4000:]
    assert len(view.attempts) == 1 and sealed.exit_codes == (0,)
    sandbox = view.sandbox
    assert sandbox is not None and sandbox[0] is not SandboxLevel.NONE and sandbox[1] is Network.DRIVER
    scores = [view.score_of(each) for each in view.submissions.values()]
    assert len(scores) == 2 and all(each is not None and each.evaluation.score is not None for each in scores)
    use = sealed.driver
    assert use is not None and (use.calls, use.tokens_in, use.tokens_out) == (
        CALLS,
        CALLS * airgap_turns.TOKENS_IN,
        CALLS * airgap_turns.TOKENS_OUT,
    )
    answered = [each for each in said if not each["held"]]
    assert [each["turn"] for each in answered] == list(range(CALLS))
    assert [each["turn"] for each in said if each["held"]] == [airgap_turns.HELD_TURN]
    servers = [each["server"] for each in said]
    assert len(set(servers)) == 2, "one before the death, its successor after it"
    assert not any(each["knows_key"] for each in said)
    pried = answered[1]["last"]
    assert "OPENAI_API_KEY" in pried and "demonstrations.jsonl" in pried and airgap_turns.OPENED not in pried, pried


def assert_ended(here: World) -> int:
    ended = read_endpoint(here.experiment.driver_endpoint(NAME))
    assert ended is not None and ended.state == "ended" and ended.problem == "no run is open to it"
    assert ended.job_id == here.job_of(f"driver-{NAME}", link=2)
    return ended.generation


def assert_nothing_left(here: World, key: str) -> None:
    """No job, no process, no key; the report is there."""
    assert here.alive_jobs() == [] and here.processes_here() == []
    assert holding(here.root.path, key) == []
    assert (here.experiment.report / "index.html").is_file()

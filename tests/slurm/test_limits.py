"""Time limits of minutes: a budget longer than one job may be becomes a chain; what no chain can hold is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from slurm_world import BEATS, World

if TYPE_CHECKING:
    from conftest import Sandbox

# A group of its own: it waits for minutes and computes nothing, so the other tests may run beside it.
pytestmark = pytest.mark.slurm

MakeWorld = Callable[..., World]


@pytest.mark.timeout(1800)
@pytest.mark.soak
def test_a_budget_longer_than_a_job_is_a_chain_of_short_jobs(
    world: MakeWorld, new_sandbox: Callable[..., Sandbox]
) -> None:
    sandbox = new_sandbox("--gpu-nodes", "2", "--gpus", "2", "--cpu-nodes", "1")
    sandbox.up()
    # Jobs of three minutes, the warning half a minute before their end or up to a minute earlier: no job holds the whole budget.
    here = world(sandbox, agent={"time": "3m"}, signal_before_end="30s")
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": "200s", "give_back_cap_s": 0}, matrix={"seed": [0, 1]})
    links = [job for job in here.submitted.submitted if job.role == "agents"]
    assert len(links) >= 3 and [job.link for job in links] == list(range(1, len(links) + 1))
    assert [job.last_link for job in links] == [False] * (len(links) - 1) + [True]
    here.wait_over(patience_s=1200)
    here.assert_whole()
    for run in here.runs:
        view = here.view(run)
        assert len(view.attempts) >= 2
        assert view.ended[0].reason.startswith("signal ")
        here.assert_used_up(run, 200.0)
    assert "TIMEOUT" not in here.queue().values()


def test_what_no_chain_can_hold_is_refused_before_anything_is_queued(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm, agent={"time": "1m"})
    done = here.launch(["null"], check=False)
    assert done.returncode == 2
    assert "nothing is left for the agent" in done.stderr
    here = world(slurm, limits={"max_time": "4m"})
    done = here.launch(["null"], check=False, budget={"wall_clock": "20d"})
    assert done.returncode == 2
    assert "jobs of 240 s in a row" in done.stderr
    assert slurm.client("squeue", "-h").stdout == ""

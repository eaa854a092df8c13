"""Which jobs an experiment gets, what each waits for, and how long they are. Nothing is asked of a scheduler."""

from __future__ import annotations

from typing import Any

import plans
import pytest

from autorl_hpc.cluster.profile import Site
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.launch import jobs as limits
from autorl_hpc.launch.jobs import JobPlan, Links, agent_links, split
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import Fault


def made(runs: int = 3, site: Site | None = None, profile: dict[str, Any] | None = None, **spec: Any) -> list[JobPlan]:
    """The jobs of a first launch."""
    return plans.plan(plans.experiment(runs, plans.profile(**(profile or {})), **spec), site)


def arrays(jobs: list[JobPlan]) -> list[JobPlan]:
    return [job for job in jobs if job.submitted.role == "agents"]


def by_role(jobs: list[JobPlan], role: str) -> list[JobPlan]:
    return [job for job in jobs if job.submitted.role == role]


@pytest.mark.parametrize(
    ("runs", "size", "parallel", "sizes", "throttles"),
    [
        (3, 1001, 2, [3], [2]),
        (1001, 1001, 8, [1001], [8]),
        (1002, 1001, 8, [501, 501], [4, 4]),
        (10, 4, 3, [4, 3, 3], [1, 1, 1]),
        (10, 4, 5, [4, 3, 3], [2, 2, 1]),
        (0, 4, 2, [], []),
    ],
)
def test_runs_are_split_evenly(runs: int, size: int, parallel: int, sizes: list[int], throttles: list[int]) -> None:
    parts = split([f"r{n}" for n in range(runs)], size, parallel)
    assert [len(part) for part, _ in parts] == sizes
    assert [throttle for _, throttle in parts] == throttles
    assert [run for part, _ in parts for run in part] == [f"r{n}" for n in range(runs)], "all, once, in order"


def test_arrays_beyond_the_throttle_wait_in_lanes() -> None:
    jobs = made(5, Site(max_array_size=1), parallel=2)
    first, second, third, fourth, fifth = arrays(jobs)
    (grader,) = [job for job in by_role(jobs, "grader-0") if job.submitted.link == 1]
    assert first.depends == second.depends == f"after:{{{grader.key}}}"
    assert third.depends == f"afterany:{{{first.key}}}"
    assert fourth.depends == f"afterany:{{{second.key}}}"
    assert fifth.depends == f"afterany:{{{third.key}}}"


def budget(wall_clock: str = "1h", **fields: Any) -> Budget:
    return Budget.model_validate({"wall_clock": wall_clock, **fields})


def links(wall_clock: str, limit_s: float | None, **profile: Any) -> Links:
    return agent_links(budget(wall_clock), plans.profile(**profile), limit_s, "there")


@pytest.mark.parametrize("limit_s", [299.0, 301.0, 359.0, 3599.0, 3600.0, 5731.0])
def test_no_job_is_longer_than_its_limit_and_none_is_counted_as_longer(limit_s: float) -> None:
    """Slurm counts in minutes: what a limit has beyond whole minutes is of no use."""
    found = links("1h", limit_s, signal_before_end="5s")
    assert found.minutes * 60 <= limit_s
    around_s = limits.START_S + 5 + limits.EARLY_S
    use_s = (found.count - (found.count > 1)) * (found.minutes * 60 - around_s)
    assert use_s >= 3600 + 1800 + limits.END_S


@pytest.mark.parametrize(
    ("limit_s", "wall_clock", "words"),
    [
        (120.0, "1h", "field `limits`: a job may last 120 s"),
        (20.0, "1h", "field `limits`: a job may last 20 s"),
        (300.0, "10h", "field `budget`: 36000 s would need"),
    ],
)
def test_a_budget_that_can_not_be_had_names_the_field(limit_s: float, wall_clock: str, words: str) -> None:
    with pytest.raises(AutorlError) as caught:
        links(wall_clock, limit_s)
    error = caught.value
    assert words in error.what and error.where == "there" and error.next_step
    assert (error.fault, error.exit_code) == (Fault.CLUSTER, Exit.USAGE)


def test_later_graders_wait_for_the_one_before_and_for_an_agent() -> None:
    jobs = made(3, grader={"count": 2, "chain": 3})
    (agents,) = arrays(jobs)
    for role in ("grader-0", "grader-1"):
        own = by_role(jobs, role)
        assert len(own) >= 3
        assert [job.submitted.link for job in own] == list(range(1, len(own) + 1))
        assert len({job.submitted.name for job in own}) == 1, "singleton goes by the name"
        assert all(job.depends == f"singleton,after:{{{agents.key}}}_0" for job in own[1:])
        assert [job.submitted.last_link for job in own] == [False] * (len(own) - 1) + [True]


def test_a_grader_in_the_agents_job_needs_no_job() -> None:
    profile = {"agent": {"gpus": 2, "cpus": 8, "memory": "64G"}, "grader": {"gpus": 1, "cpus": 2, "memory": "500M"}}
    jobs = made(3, profile=profile, grader={"placement": "step", "count": 2})
    assert [job.submitted.role for job in jobs] == ["agents", "report"]
    agents, report = jobs
    assert agents.depends == ""
    assert (agents.kind.gpus, agents.kind.cpus, agents.kind.memory) == (3, 10, f"{64 * 1024 + 500}M")
    assert report.depends == f"afterany:{{{agents.key}}}"

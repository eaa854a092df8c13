"""Which jobs an experiment gets, what each waits for, and how long they are. Nothing is asked of a scheduler."""

from __future__ import annotations

import math
import re
from typing import Any

import plans
import pytest

from autorl_hpc.cluster.profile import Site
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.launch import jobs as limits
from autorl_hpc.launch.jobs import JobPlan, Links, Needs, agent_links, chain_links, split
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import Fault

DAY_S = 86400.0


def made(runs: int = 3, site: Site | None = None, profile: dict[str, Any] | None = None, **spec: Any) -> list[JobPlan]:
    """The jobs of a first launch."""
    return plans.plan(plans.experiment(runs, plans.profile(**(profile or {})), **spec), site)


def arrays(jobs: list[JobPlan]) -> list[JobPlan]:
    return [job for job in jobs if job.submitted.role == "agents"]


def by_role(jobs: list[JobPlan], role: str) -> list[JobPlan]:
    return [job for job in jobs if job.submitted.role == role]


def waits_for(job: JobPlan, jobs: list[JobPlan]) -> set[int]:
    """Numbers of the jobs that its dependency names, which all come before it."""
    numbers = {int(number) for number in re.findall(r"\{n(\d+)\}", job.depends)}
    earlier = {other.submitted.number for other in jobs[: jobs.index(job)]}
    assert numbers <= earlier, f"{job.depends} names a job that is not submitted yet"
    return numbers


@pytest.mark.parametrize(
    ("runs", "size", "parallel", "sizes", "throttles"),
    [
        (3, 1001, 2, [3], [2]),
        (500, 1001, 8, [500], [8]),
        (1001, 1001, 8, [1001], [8]),
        (1002, 1001, 8, [501, 501], [4, 4]),
        (10, 4, 3, [4, 3, 3], [1, 1, 1]),
        (10, 4, 10, [4, 3, 3], [4, 3, 3]),
        (10, 4, 5, [4, 3, 3], [2, 2, 1]),
        (10, 4, 100, [4, 3, 3], [4, 3, 3]),
        (10, 4, 1, [4, 3, 3], [1, 1, 1]),
        (3, 1, 2, [1, 1, 1], [1, 1, 1]),
        (1, 1, 1, [1], [1]),
        (0, 4, 2, [], []),
    ],
)
def test_runs_are_split_evenly(runs: int, size: int, parallel: int, sizes: list[int], throttles: list[int]) -> None:
    parts = split([f"r{n}" for n in range(runs)], size, parallel)
    assert [len(part) for part, _ in parts] == sizes
    assert [throttle for _, throttle in parts] == throttles
    assert [run for part, _ in parts for run in part] == [f"r{n}" for n in range(runs)], "all, once, in order"


def most_at_once(jobs: list[JobPlan]) -> int:
    """Tasks that may run at once: arrays that wait for each other (in whole) don't run together, others may."""
    own = arrays(jobs)
    after: dict[int, set[int]] = {}
    for job in own:
        direct = waits_for(job, jobs)
        after[job.submitted.number] = direct.union(*(after.get(number, set()) for number in direct))
    best = 0
    for job in own:  # with each: all that neither wait for it nor it for them, and that don't wait for each other
        together = [job]
        for other in own:
            if all(
                other.submitted.number not in after[one.submitted.number]
                and one.submitted.number not in after[other.submitted.number]
                and other is not one
                for one in together
            ):
                together.append(other)
        best = max(best, sum(one.throttle for one in together))
    return best


@pytest.mark.parametrize("runs", [1, 10, 37])
@pytest.mark.parametrize("size", [1, 4, 1001])
@pytest.mark.parametrize("parallel", [1, 3, 40])
@pytest.mark.parametrize("limit", [None, "30m"])
def test_the_throttle_is_kept(runs: int, size: int, parallel: int, limit: str | None) -> None:
    """However the runs are split, and also where every array has several links: as many at once as asked for, not more."""
    profile = {} if limit is None else {"agent": {"time": limit}}
    jobs = made(runs, Site(max_array_size=size), profile, parallel=parallel)
    assert most_at_once(jobs) == min(parallel, runs)
    assert all(1 <= job.throttle <= len(job.submitted.runs) <= size for job in arrays(jobs))


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


def test_one_job_holds_budget_give_back_start_warning_and_end() -> None:
    # 3600 + 1800 given back + 120 end + 60 start + 90 warning + 60 early + 360 spare
    assert links("1h", None) == Links(1, 102)
    assert links("1h", DAY_S) == Links(1, 102)
    assert agent_links(budget(give_back_cap_s=0), plans.profile(), None, "there") == Links(1, 72)
    assert links("1h", None, signal_before_end="10m") == Links(1, 110)


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


def test_the_first_grader_waits_for_nothing_and_agents_for_a_grader() -> None:
    jobs = made(3, grader={"count": 2})
    assert [job.submitted.role for job in jobs[:3]] == ["grader-0", "grader-1", "agents"]
    assert jobs[0].depends == jobs[1].depends == "singleton"
    assert jobs[2].depends == f"after:{{{jobs[0].key}}}?after:{{{jobs[1].key}}}", "whichever starts first"


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


def test_the_report_waits_for_graders_that_stand_already() -> None:
    record = plans.experiment(3, plans.profile())
    jobs = plans.plan(record, needs=Needs(["r2"], [0], report=True, present=("501", "502")))
    assert [job.submitted.role for job in jobs] == ["agents", "report"]
    assert jobs[0].depends == "after:501?after:502", "agents start with a grader, whichever launch submitted it"
    assert jobs[1].depends == "afterany:501:502"


def test_a_grader_in_the_agents_job_needs_no_job() -> None:
    profile = {"agent": {"gpus": 2, "cpus": 8, "memory": "64G"}, "grader": {"gpus": 1, "cpus": 2, "memory": "500M"}}
    jobs = made(3, profile=profile, grader={"placement": "step", "count": 2})
    assert [job.submitted.role for job in jobs] == ["agents", "report"]
    agents, report = jobs
    assert agents.depends == ""
    assert (agents.kind.gpus, agents.kind.cpus, agents.kind.memory) == (3, 10, f"{64 * 1024 + 500}M")
    assert report.depends == f"afterany:{{{agents.key}}}"


@pytest.mark.parametrize("runs", [1, 10, 40])
@pytest.mark.parametrize("limit_s", [None, 3600.0, DAY_S, 7 * DAY_S])
def test_graders_last_from_the_first_agent_to_the_last(runs: int, limit_s: float | None) -> None:
    spec = plans.experiment(runs, plans.profile(), parallel=4, grader={"chain": 1}).spec
    agent = Links(1, 95)
    chain = chain_links(spec, runs, agent, limit_s, None, 1)
    assert chain.count * chain.minutes * 60 >= math.ceil(runs / 4) * 95 * 60 + limits.CLOSING_S
    assert chain.minutes * 60 <= min(limit_s or DAY_S, DAY_S), "no week for a grader, whatever the partition allows"


def test_the_report_waits_for_all_graders_and_comes_last() -> None:
    jobs = made(3, grader={"count": 2})
    graders = [*by_role(jobs, "grader-0"), *by_role(jobs, "grader-1")]
    assert jobs[-1].submitted.role == "report" and jobs[-1].depends.startswith("afterany:")
    assert waits_for(jobs[-1], jobs) == {job.submitted.number for job in graders}


def test_agents_that_stand_have_their_share_of_the_throttle() -> None:
    record = plans.experiment(9, plans.profile(), parallel=4)
    jobs = plans.plan(record, needs=Needs(["r2", "r3"], [0], report=True, present=("501",), busy=3))
    assert by_role(jobs, "agents")[0].throttle == 1
    jobs = plans.plan(record, needs=Needs(["r2", "r3"], [0], report=True, present=("501",), busy=9))
    assert by_role(jobs, "agents")[0].throttle == 1, "at least one goes on"

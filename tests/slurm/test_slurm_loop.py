"""The whole loop through sbatch on a real Slurm: two agents, a chain of graders, a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from helpers import SLURM_PATIENCE_S, SUBMITS_ONE
from slurm_world import SLEEPS, World
from vllm_stand_in import make_program

from autorl_hpc.cluster import slurm
from autorl_hpc.files.store import EndpointWatch, read_endpoint
from autorl_hpc.records.exchange import Heads

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

MakeWorld = Callable[..., World]


def test_two_agents_a_chain_and_a_report(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("one", SUBMITS_ONE)
    here.launch(["one", "null"], "--dry-run")
    both = [here.start("launch", "exp.yaml") for _ in range(2)]  # at once: one of them submits
    assert [process.wait(SLURM_PATIENCE_S) for process in both] == [0, 0], here.logs()
    roles = [job.role for job in here.submitted.submitted]
    assert roles[:2] == ["grader-0", "agents"] and roles.count("agents") == 1
    here.wait_over()
    here.assert_whole()
    one, null = (here.view(run) for run in here.runs)
    assert one.closed is not None and one.closed.selected == 1
    assert null.sealed is not None and null.sealed.fault is None
    assert (here.experiment.report / "index.html").stat().st_size > 1000
    assert set(here.queue().values()) == {"COMPLETED"}
    assert_anchored(here)
    again = here.launch_facts()
    assert again["jobs"] == []
    assert_rescored_by_jobs(here)


def assert_rescored_by_jobs(here: World) -> None:
    """`rescore --submit`: a job for each bundle, whose verdict is the maintainer's; what waits or has a verdict is not submitted again."""
    bundles = [str(here.root.path / f"{run}.tar.gz") for run in here.runs]
    for run, bundle in zip(here.runs, bundles, strict=True):
        here.run("export", str(here.run_dir(run).path), "--out", bundle)
    out = here.root.path / "verdicts"
    words = ("rescore", *bundles, "--out", str(out), "--device", "cpu")
    assert here.run(*words, "--submit", "test").stderr.count(": submitted, log ") == 2
    here.until(lambda: len(list(out.glob("*.json"))) == 2, "both verdicts")
    told = [json.loads(path.read_text()) for path in out.glob("*.json")]
    assert {one["run_id"] for one in told} == set(here.runs) and all(one["holds"] for one in told), told
    for more in (("--submit", "test"), ()):
        assert here.run(*words, *more).stderr == "", "nothing is done twice"
    assert "squeue" not in here.run("status", str(here.experiment.path)).stderr


def assert_anchored(here: World) -> None:
    """The head in the report job's comment is the one that these chains give, and doesn't fit them once they are altered."""
    experiment = str(here.experiment.path)
    said = here.run("verify", experiment).stdout
    assert said.count("anchored by the comment of Slurm job") == 1 + len(here.runs), said
    ledger = here.run_dir(here.runs[0]).ledger
    last = max(ledger.iterdir())
    before = last.read_bytes()
    last.unlink()
    said = here.run("verify", experiment, check=False).stdout
    assert "names the head" in said and "anchored by" not in said, said
    last.write_bytes(before)
    here.run("verify", experiment)


@pytest.mark.soak
def test_with_accounting(world: MakeWorld, slurm_accounting: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(slurm_accounting)
    here.agent("one", SUBMITS_ONE)
    here.launch(["one", "null"])
    here.wait_over()
    here.assert_whole()
    assert_anchored(here)
    # What the controller has forgotten, the database still tells.
    monkeypatch.setenv("SLURM_CONF", slurm_accounting.env["SLURM_CONF"])
    run = slurm.run
    monkeypatch.setattr(slurm, "run", lambda argv, **more: "" if argv[0] == "squeue" else run(argv, **more))
    (word,) = here.until(lambda: slurm.told(here.submitted), "the database to know it")
    heads = json.loads((here.experiment.path / "heads.json").read_text())
    assert heads["runs"] and word.short == Heads.model_validate(heads).short


def test_grader_in_the_agents_own_job(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    shows = SUBMITS_ONE + 'echo "agent has $CUDA_VISIBLE_DEVICES"\n'
    here.agent("one", shows)
    here.launch(["one"], grader={"placement": "step"}, matrix={"seed": [0, 1]})
    assert {job.role for job in here.submitted.submitted} == {"agents", "report"}
    here.wait_over()
    here.assert_whole()
    for run in here.runs:
        assert here.run_dir(run).agent_log.read_text().splitlines()[-1] == "agent has 0"
    assert (here.experiment.report / "index.html").exists()


@pytest.mark.parametrize("part", ["partition", "gpus"])
def test_a_refusal_is_told_in_the_schedulers_words_and_nothing_is_left(
    world: MakeWorld, slurm: Sandbox, part: str
) -> None:
    wrong: dict[str, Any] = {"report": {"partition": "nowhere"}} if part == "partition" else {"agent": {"gpus": 9}}
    here = world(slurm, **wrong)
    done = here.launch(["null"], check=False)
    assert done.returncode in (2, 3)
    expected = "no partition `nowhere`" if part == "partition" else "Requested node configuration is not available"
    assert expected in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    if part == "gpus":
        assert "the job `agents` was refused; the 1 jobs submitted before it were taken back" in done.stderr
        here.until(lambda: not here.alive_jobs(), "the first job to be taken back")


def test_cancel_leaves_nothing_behind(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("sleeps", SLEEPS)
    # With a driver, which one job of a chain serves and the next one after its death.
    here.more_env = {"AUTORL_DRIVER_TIMING": "beat_s=0.2,users_s=0.5"}
    here.profile(driver={"gpus": 1, "cpus": 1, "memory": "1G"}, vllm=str(make_program(here.root.path)))
    driver = {"kind": "vllm", "model": "autorl/tiny"}
    seeds = {"seed": [0, 1, 2, 3], "driver": "local"}
    given: dict[str, Any] = {
        "matrix": seeds,
        "drivers": {"local": driver},
        "parallel": 2,
        "budget": {"wall_clock": "1h"},
    }
    done = here.launch(["sleeps"], "--dry-run", **given)
    assert "its job has 1 GPU, " in done.stdout and "job driver" in done.stdout
    here.launch(["sleeps"], **given)
    here.wait_agent(here.runs[0])
    here.wait_agent(here.runs[1])
    first = read_endpoint(here.experiment.driver_endpoint("local"))
    assert first is not None and first.ready and first.job_id == here.job_of("driver-local")
    slurm.client("scancel", here.job_of("driver-local"))
    watch = EndpointWatch(here.experiment.driver_endpoint("local"))
    second = here.until(lambda: (e := watch.ready()) and e.generation > first.generation and e, "the driver's next job")
    assert second.job_id == here.job_of("driver-local", link=2) and second.url != first.url
    assert here.launch_facts()["jobs"] == []
    facts = json.loads(here.run("cancel", str(here.experiment.path), "--json").stdout)
    assert facts["not_sealed"] == facts["jobs_left"] == []
    assert here.alive_jobs() == []
    here.assert_no_process()
    here.assert_whole()
    assert [here.view(run).sealed.ended_by for run in here.runs] == ["cancelled"] * 4  # type: ignore[union-attr]

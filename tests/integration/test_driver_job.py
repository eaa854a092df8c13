"""The driver job with real processes, and a stand-in in the place of `vllm serve`: it is found, it comes back, it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import PATIENCE_S, Cluster, alive, command_of, wait_for
from vllm_stand_in import make_program

from autorl_hpc.files.frozen_records import JOBS_NAME, process_start
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.store import EndpointWatch, newest_generation, read_endpoint, read_key
from autorl_hpc.launch.local import processes
from autorl_hpc.records.driver import DriverEndpoint
from autorl_hpc.states import EXIT_RESUME, EndedBy, Fault

WAITS = '#!/usr/bin/env bash\ncd "$WORKSPACE"\ntouch code/up\nuntil [ -e code/over ]; do sleep 0.1; done\n'
"""An agent that lives until the test lets it go: a driver ends soon after its last run."""

LOCAL: dict[str, Any] = {"kind": "vllm", "model": "autorl/tiny", "context_tokens": 512, "args": ["--max-num-seqs=4"]}


class World(Cluster):
    """A root with a driver `local`; its program is the stand-in."""

    def __init__(self, staged: Path, tmp: Path) -> None:
        super().__init__(staged, tmp)
        self.faults = tmp / "stand-in"
        self.faults.mkdir()
        self.program = make_program(self.faults)
        # A server that a busy machine keeps from answering for some seconds is not one that hangs.
        self.timing = "beat_s=0.1,users_s=0.3,hang_s=20,pause_s=0.1,failures=2"

    @property
    def env(self) -> dict[str, str]:  # type: ignore[override]
        return {**super().env, "AUTORL_VLLM": str(self.program), "AUTORL_DRIVER_TIMING": self.timing}

    def lay(self, agent: str = "null", name: str = "exp", **driver: Any) -> str:
        """An experiment of one run that calls the driver; its run id."""
        drivers = {"local": {**LOCAL, **driver}}
        (run_id,) = self.prepare([agent], name=name, matrix={"driver": "local"}, drivers=drivers, attempts=1)
        return run_id

    def ready(
        self, experiment: ExperimentDir, good: Callable[[DriverEndpoint], bool] = lambda _: True
    ) -> DriverEndpoint:
        """The endpoint once it is ready and as wanted."""
        watch = EndpointWatch(experiment.driver_endpoint("local"))

        def look() -> DriverEndpoint | None:
            found = watch.ready()
            return found if found is not None and good(found) else None

        try:
            found: DriverEndpoint = wait_for(look, "the driver to be ready")
        except AssertionError as error:
            said = experiment.driver_log("local")
            log = said.read_text() if said.exists() else "no server"
            raise AssertionError(f"{error}\n{watch.last}\n{log}\n{self.logs()}") from None
        return found

    def servers(self) -> list[int]:
        """Stand-ins that live."""
        return [pid for pid in self.processes_here() if b"vllm_stand_in" in command_of(pid)]


@pytest.fixture
def world(staged: Path, tmp_path: Path) -> Iterator[World]:
    made = World(staged, tmp_path)
    try:
        yield made
    finally:
        made.end()


def ask(endpoint: DriverEndpoint, key: str) -> Any:
    """What the driver answers to a question."""
    body = json.dumps({"model": endpoint.model, "messages": [{"role": "user", "content": "?"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{endpoint.url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def answering(
    world: World, experiment: ExperimentDir, key: str, good: Callable[[DriverEndpoint], bool]
) -> DriverEndpoint:
    """The endpoint that has answered: of two jobs, the one that was ready may be the one that steps back."""

    def asked() -> DriverEndpoint | None:
        found = world.ready(experiment, good)
        with contextlib.suppress(OSError, http.client.HTTPException):
            return found if ask(found, key) == "stand-in" else None
        return None

    found: DriverEndpoint = wait_for(asked, "an answer")
    return found


def driver_job(experiment: ExperimentDir) -> int:
    """The process id of the one job that serves."""
    (pid,) = (pid for pid, words in processes(experiment).items() if words[0] == "driver")
    return pid


def test_a_driver_answers_comes_back_from_each_death_and_ends_with_its_runs(world: World) -> None:  # noqa: PLR0915 - one world
    world.agent("waits", WAITS)
    run_id = world.lay("waits")
    here, key_file = world.experiment, world.experiment.driver_key("local")
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = read_key(key_file)
    stands_for_agents = world.supervisor(run_id)  # it waits for the driver: no attempt's clock runs
    agents = {"role": "agents", "pid": os.getpid(), "started": process_start(os.getpid())}
    (here.jobs / JOBS_NAME).write_text(json.dumps({"schema_version": 1, "jobs": [agents]}))
    keeper = world.start("job", "drive", str(here.path), "local")

    first = world.ready(here)
    assert ask(first, key) == "stand-in"
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(first, "another")
    assert refused.value.code == 401
    (server,) = world.servers()
    command = command_of(server).decode()
    assert key not in command and "--max-model-len=512" in command and "--max-num-seqs=4" in command
    assert key not in here.driver_log("local").read_text() + world.logs()
    # The run had waited; with the driver there it goes to its end, and so does the driver, of itself.
    wait_for((world.workspace(run_id) / "code" / "up").exists, "the agent")
    (world.workspace(run_id) / "code" / "over").touch()
    assert stands_for_agents.wait(PATIENCE_S) == 0, world.logs()
    sealed = world.view(run_id).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.AGENT_EXIT and sealed.fault is None
    wait_for(lambda: not world.servers(), "the server to end with the last run")
    ended = wait_for(
        lambda: (e := read_endpoint(here.driver_endpoint("local"))) and e.state == "ended" and e, "its word"
    )
    assert ended.problem == "no run is open to it" and not ended.ready

    # A later launch brings a run: the keeper, which still stands, serves again.
    more = yaml.safe_load((world.root.path / "exp.yaml").read_text())["matrix"] | {"seed": [0, 1]}
    world.prepare(["null"], matrix=more, drivers={"local": LOCAL}, attempts=1)
    one = world.ready(here, lambda e: e.generation > first.generation)

    (server,) = world.servers()
    os.kill(server, signal.SIGKILL)
    two = world.ready(here, lambda e: e.starts > one.starts)
    assert two.url != one.url and two.generation == one.generation
    assert ask(two, key) == "stand-in"

    (world.faults / "hang").touch()
    wait_for(lambda: "hanging" in here.driver_log("local").read_text(), "the server to hang")
    (world.faults / "hang").unlink()
    three = world.ready(here, lambda e: e.starts > two.starts)
    assert ask(three, key) == "stand-in"

    (server,) = world.servers()
    os.kill(driver_job(here), signal.SIGKILL)  # as a node dies
    wait_for(lambda: not alive(server), "the server to die with its job")
    four = world.ready(here, lambda e: e.generation > three.generation)
    assert four.starts == 1 and ask(four, key) == "stand-in"

    old = driver_job(here)
    newer = world.start("job", "driver", str(here.path), "local")  # the scheduler started the job a second time
    wait_for(lambda: not alive(old), "the older job to step back")
    five = answering(world, here, key, lambda e: e.generation > four.generation)

    # A second experiment on this node: ports of their own. TERM ends a job with its server.
    world.lay(name="other")
    other = world.root.experiment("other")
    world.start("job", "driver", str(other.path), "local")
    beside = world.ready(other)
    assert beside.url != five.url and ask(beside, read_key(other.driver_key("local"))) == "stand-in"
    for process in (keeper, newer, world.processes[-1]):
        process.terminate()
    for process in (keeper, newer, world.processes[-1]):
        process.wait(PATIENCE_S)
    wait_for(lambda: not world.servers(), "no server to be left")


def test_a_driver_that_never_comes_up_is_the_clusters_fault_and_costs_no_budget(world: World) -> None:
    run_id = world.lay(patience_s=3)
    (world.faults / "fail").touch()
    assert world.start("job", "driver", str(world.experiment.path), "local").wait(PATIENCE_S) == 1
    told = read_endpoint(world.experiment.driver_endpoint("local"))
    assert told is not None and told.state == "failed" and told.starts == 2
    assert told.problem == "its server ended with 1: ValueError: Free memory on device is less than desired"
    status = " ".join(world.run("status", str(world.experiment.path)).stdout.split())
    assert "driver local: failed" in status and "Free memory on device" in status
    assert world.supervisor(run_id).wait(PATIENCE_S) == EXIT_RESUME
    assert world.supervisor(run_id).wait(PATIENCE_S) == 0
    sealed = world.view(run_id).sealed
    assert sealed is not None and sealed.fault is Fault.CLUSTER and sealed.elapsed_s == 0
    assert sealed.reason and "the driver local doesn't answer" in sealed.reason and "Free memory" in sealed.reason
    # Without a program at all.
    world.program = world.faults / "nowhere"
    world.lay(name="other")
    other = world.root.experiment("other")
    assert world.start("job", "driver", str(other.path), "local").wait(PATIENCE_S) == 3
    told = read_endpoint(other.driver_endpoint("local"))
    assert (
        told is not None
        and told.state == "failed"
        and "nowhere` that serves the driver is not here" in (told.problem or "")
    )
    assert newest_generation(other.drivers, "local") == 1

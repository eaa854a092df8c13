"""The supervisor's side of a gateway: one that hangs is ended and started again, and who asks in between waits and is answered."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PATIENCE_S, wait_for

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.experiment import Budget
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.children import GatewayProcess

MODEL = "m"


def made(folder: Path, **environ: str) -> GatewayProcess:
    run = RunDir(folder / "run")
    run.path.mkdir()
    budget = Budget(wall_clock_s=3600.0, grace_s=60.0)
    clock = BudgetClock(folder / "clock.json", budget, 1)
    spec = DriverSpec(kind="api", url="https://api.example.org/v1", model=MODEL)
    outer = {"PATH": os.environ["PATH"], **environ}
    return GatewayProcess(ExperimentDir(folder), run, "d", spec, clock, folder / "socket", outer)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    one = made(tmp_path)
    try:
        one.start()
        yield one
    finally:
        one.end()


def models(gateway: GatewayProcess) -> list[str]:
    """What it says that it has."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {gateway.token}"})
        return [row["id"] for row in json.loads(connection.getresponse().read())["data"]]
    finally:
        connection.close()


def events(gateway: GatewayProcess) -> list[str]:
    return [json.loads(line)["event"] for line in gateway.run.events.read_text().splitlines()]


def pid(gateway: GatewayProcess) -> int:
    process = gateway._process
    return 0 if process is None else process.pid


def test_who_asks_while_it_is_started_again_is_answered(gateway: GatewayProcess) -> None:
    assert models(gateway) == [MODEL]
    first = pid(gateway)
    os.kill(first, signal.SIGKILL)
    assert models(gateway) == [MODEL], "not refused: the socket is the supervisor's"
    assert pid(gateway) not in (0, first)


@pytest.mark.slow
def test_one_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    one = made(tmp_path)
    one.ping_s, one.hung_pings = 0.5, 10**6  # a busy machine's seems to hang while it starts
    try:
        one.start()
        first = pid(one)
        os.kill(first, signal.SIGSTOP)
        one.hung_pings = 4
        wait_for(lambda: "gateway_hung" in events(one), "it to be found")
        one.hung_pings = 10**6
        wait_for(lambda: pid(one) not in (0, first), "the next one")
        assert models(one) == [MODEL]
        assert events(one).count("gateway_crashed") >= 1
    finally:
        one.end()
    assert not (tmp_path / "socket").exists()
    wait_for(lambda: not any(thread.name == "gateway" for thread in threading.enumerate()), "its thread's end")


def test_one_that_can_take_no_connection_is_not_ended(tmp_path: Path) -> None:
    """Whoever connects often enough could have it killed otherwise, and with it the account of what is under way."""
    one = made(tmp_path)
    one.ping_s, one.hung_pings = 0.1, 100
    try:
        one.start()
        first = pid(one)
        resource.prlimit(first, resource.RLIMIT_NOFILE, (3, resource.prlimit(first, resource.RLIMIT_NOFILE)[1]))
        before = one._answered
        wait_for(lambda: one._answered > before + 10, "it to answer often")
        assert pid(one) == first and "gateway_hung" not in events(one)
    finally:
        one.end()


def test_a_proxy_that_is_no_http_proxy_is_told_before_the_agent_starts(tmp_path: Path) -> None:
    with pytest.raises(AutorlError, match=r"`socks5h`.*HTTP proxies"):
        made(tmp_path, ALL_PROXY="socks5h://proxy:1080").start()

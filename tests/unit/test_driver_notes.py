"""What a launch notes about an experiment's drivers before anything is queued; what a driver's answers say of key and cluster."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import alive, wait_for

from autorl_hpc.drivers.client import lost, wait_key
from autorl_hpc.drivers.serve import Server
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.safe_open import DriverCall
from autorl_hpc.files.store import read_endpoint, write_key
from autorl_hpc.gateway.accounting import CallRecord
from autorl_hpc.gateway.upstream import _blame, cluster_trouble
from autorl_hpc.launch.drivers import notes
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.experiment import ExperimentSpec


def noted(level: str = "bwrap", *, of_runs: str | list[str] = "d", network: str | None = None, **driver: Any) -> str:
    """The notes, of a spec whose one driver is an API.

    Args:
        of_runs: `matrix.driver`.
    """
    spec = {
        "name": "x",
        "drivers": {"d": {"kind": "api", "url": "https://api.example.org/v1", "model": "m", **driver}},
        "matrix": {"task": "gsm8k", "agent": "mini", "driver": of_runs, "base_model": "b", "seed": [0]},
        "budget": {"wall_clock": "1h"},
        "sandbox": {"level": level, "network": network},
    }
    return "\n".join(notes(ExperimentSpec.model_validate(spec)))


@pytest.mark.parametrize("key", [{"key_file": "/k"}, {"key_variable": "K"}])
def test_a_key_that_an_agent_could_read_is_warned_of(key: dict[str, str]) -> None:
    assert "WARNING: at sandbox level none an agent can read" in noted("none", **key)
    assert "WARNING: on a node where no sandbox level works" in noted("auto", **key)
    assert noted("landlock", **key) == "" and noted("none") == ""


def test_runs_that_no_leaderboard_compares_are_noted_before_they_run() -> None:
    both = ["d", "none"]
    assert "sandbox: {network: driver}` gives all of them the same" in noted(of_runs=both)
    assert noted(of_runs=both, network="driver") == noted(of_runs="none") == noted() == ""
    assert noted("none", of_runs=both) == "", "at level none all networks are open"


PAGE, QUOTA = "<html>no such page</html>", '{"error": {"code": "insufficient_quota"}}'
NO_KEY = (
    '[{"error": {"code": 400, "status": "INVALID_ARGUMENT", "details": [{"@type": "t", "reason": "API_KEY_INVALID"}]}}]'
)
ECHO = (
    "billing: credit balance, insufficient_quota, api key, insufficient balance; the model or deployment does not exist"
)
"""What an agent wrote, as endpoints repeat it in their messages."""
ECHOED = [
    ECHO,
    json.dumps({"error": {"message": ECHO, "type": "invalid_request_error", "param": ECHO, "code": 400}}),
    json.dumps(
        {"error": {"message": QUOTA, "status": "INVALID_ARGUMENT", "details": [{"description": "API_KEY_INVALID"}]}}
    ),
    json.dumps({"error": {"message": "insufficient_quota", "param": "model_not_found"}}),
    json.dumps({"detail": [{"type": "missing", "msg": ECHO, "input": {"code": "insufficient_quota"}}]}),
    json.dumps([[QUOTA], {"error": {"code": "insufficient_quota"}}]),
]
SAYS: list[tuple[int, str, bool, str | None]] = [  # status, words, whether its path is known; what it says, None: the request's fault
    (401, "invalid key", False, "refuses the key"),
    (403, "not in your region", True, "refuses the key"),
    (400, NO_KEY, True, "refuses the key"),
    (402, "Insufficient Balance", True, "gives this account no answers"),
    (429, QUOTA, True, "gives this account no answers"),
    (400, '{"type": "error", "error": {"type": "billing_error"}}', True, "gives this account no answers"),
    (404, "no such page", True, "knows no such model or address"),
    (404, '{"error": {"code": "model_not_found"}}', False, "knows no such model or address"),
    (410, "", False, "knows no such model or address"),
    (405, PAGE, True, "knows no such model or address"),
    (307, "", True, "sends elsewhere"),
    *((status, "x", True, "is not there at the moment") for status in (408, 409, 421, 424, 425, 429, 451, 500, 503, 529)),
    *((status, "x", True, None) for status in (400, 413, 414, 415, 422, 431)),  # its own parameters, its length
    (400, "prompt is too long: 9 tokens > 8 maximum; the model's context", True, None),
    *((status, said, False, None) for said in ECHOED for status in (400, 404)),
    (404, "not found", False, None),  # an agent of no dialect may ask at another address
]  # fmt: skip


@pytest.mark.parametrize(("status", "said", "known", "problem"), SAYS)
def test_what_an_error_says_of_key_account_and_place(status: int, said: str, known: bool, problem: str | None) -> None:
    """One table for the proof of the key and for the gateway's log."""
    found, passes = cluster_trouble(status, said, known=known)
    assert (found or "").startswith(problem or "") and (found is None) == (problem is None)
    assert passes == (problem == "is not there at the moment")
    call = CallRecord("openai-chat", "/v1/chat/completions", status=status)
    _blame(call, status, said, known)
    assert call.fault == ("agent" if problem is None else "cluster")
    once = problem is not None and not passes and status != 403
    assert call.error is not None and call.error.startswith("driver_refuses: ") == once


def test_a_page_in_place_of_an_answer_proves_no_key(tmp_path: Path) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

    key = tmp_path / "key"
    write_key(key, "sk-0123456789")
    place = ExperimentDir(tmp_path).driver_endpoint("d")
    place.parent.mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        spec = DriverSpec.model_validate({"kind": "api", "url": url, "model": "m", "key_file": str(key)})
        assert not wait_key(ExperimentDir(tmp_path), "d", spec, "openai-chat", place.exists)
        server.shutdown()
    told = read_endpoint(place)
    assert told is not None and told.state == "failed" and "is not there at the moment (502" in (told.problem or "")


def test_a_key_that_was_corrected_after_an_attempt_gave_up_is_asked(tmp_path: Path) -> None:
    """What the last attempt left was taken for the word on the new key: no launch went on any more."""
    asked: list[str | None] = []

    class Driver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200 if asked[-1] == "Bearer sk-right-key" else 401)
            self.end_headers()
            self.wfile.write(
                b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
            )

    key, experiment = tmp_path / "key", ExperimentDir(tmp_path)
    experiment.drivers.mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Driver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        spec = DriverSpec.model_validate({"kind": "api", "url": url, "model": "m", "key_file": str(key)})
        write_key(key, "sk-wrong-key")
        with pytest.raises(AutorlError, match="refuses the key"):
            wait_key(experiment, "d", spec, "openai-chat", patience_s=0.0)
        write_key(key, "sk-right-key")
        assert wait_key(experiment, "d", spec, "openai-chat", patience_s=0.0)
        server.shutdown()
    assert asked == ["Bearer sk-wrong-key", "Bearer sk-right-key"]


GOOD, BAD = {"status": 200}, {"status": 503, "fault": "cluster", "error": "the driver answered 503: x"}
KEY_GONE = {"status": 401, "fault": "cluster", "error": "driver_key: the driver refuses the key"}
NO_MODEL = {"status": 404, "fault": "cluster", "error": "driver_refuses: the driver answered 404: no model"}
HANGS = {"status": 0, "under_way": True}
LATE = {**BAD, "status": 504}


def at(elapsed_s: float, call: dict[str, Any], total_s: float = 0.0) -> dict[str, Any]:
    return {**call, "elapsed_s": elapsed_s, "total_s": total_s}


@pytest.mark.parametrize(
    ("calls", "lost_"),
    [
        ([], False),
        ([GOOD, KEY_GONE], True),
        ([GOOD, NO_MODEL], True),
        ([KEY_GONE, GOOD], False),
        ([GOOD, BAD, BAD], False),  # a request of the agent's own may bring about one
        ([GOOD, BAD, BAD, BAD], True),
        ([BAD, BAD, GOOD, BAD], False),
        ([KEY_GONE, {"status": 400, "fault": "agent"}], True),
        ([KEY_GONE, {"status": 403, "refused": "budget_exhausted"}], True),
        ([{**KEY_GONE, "attempt": 1}], False),  # of an earlier attempt
    ],
)
def test_when_a_driver_counts_as_lost(calls: list[dict[str, Any]], lost_: bool) -> None:
    assert all((lost(made(calls), 2, 3600.0, exited=exited) is not None) == lost_ for exited in (False, True))
    assert lost(made(calls), 2, 3600.0, exited=True, answers=lambda: True) is None, "it was the agent's doing"


EMPTY = {"status": 400, "fault": "agent"}  # `Your credit balance is too low`, by words alone


@pytest.mark.parametrize(
    ("calls", "lost_"),
    [([GOOD, EMPTY, EMPTY, EMPTY], True), ([EMPTY, EMPTY, EMPTY, GOOD], False), ([GOOD, EMPTY, EMPTY], False)],
)
def test_a_driver_that_refuses_with_400_is_asked_a_question_of_our_own(
    calls: list[dict[str, Any]], lost_: bool
) -> None:
    """An account that is empty was charged to the agent; an agent's own bad requests are not."""
    found = [
        lost(made(calls), 2, 3600.0, exited=True, answers=lambda no=no: no, again=again)
        for no in (False, True)
        for again in (False, True)
    ]
    assert [one is not None for one in found] == [lost_, lost_, False, False]
    assert lost(made(calls), 2, 3600.0, exited=True) is None, "nobody asked"


@pytest.mark.parametrize(
    ("calls", "at_end", "at_exit"),  # of a run of 3600 s
    [
        ([at(100, GOOD, 5), at(1000, HANGS)], True, True),
        ([at(100, GOOD, 5), at(2000, HANGS)], False, False),  # less than half of its time
        ([at(100, GOOD, 5), at(3000, GOOD, 5), at(1000, HANGS)], False, False),  # it answers others meanwhile
        ([at(700, LATE, 600), at(1400, LATE, 600), at(2100, HANGS)], True, True),
        ([at(2000, LATE, 1900), at(2100, GOOD, 5)], True, False),  # an agent that exits had its answers at the end
        ([at(1900, LATE, 900), at(1900, LATE, 900), at(1950, GOOD, 5)], False, False),  # of two at once
        ([at(2000, {"status": 0}, 1900), at(2100, GOOD, 5)], True, False),  # cut by the end of a gateway
        (
            [{**at(1000, HANGS), "attempt": 1}, at(3000, GOOD, 5)],
            False,
            False,
        ),  # when an earlier attempt's ended is not known
        ([{**at(2000, LATE, 1900), "attempt": 1}], True, False),
        ([at(2000, {"status": 400, "fault": "agent"}, 1900)], False, False),
    ],
)
def test_a_driver_that_is_silent_for_most_of_the_time_is_lost(
    calls: list[dict[str, Any]], at_end: bool, at_exit: bool
) -> None:
    """Catches a driver that hangs until the budget's end: no request fails then."""
    found = [lost(made(calls), 2, 3600.0, exited=exited) for exited in (False, True)]
    assert [each is not None for each in found] == [at_end, at_exit]
    assert lost(made([at(1, HANGS)]), 2, 50.0, exited=True) is None, "it exits while its first request is under way"


def made(calls: list[dict[str, Any]]) -> list[DriverCall]:
    same = {"at": "t", "dialect": "openai-chat", "path": "/v1/chat/completions", "attempt": 2}
    return [DriverCall.model_validate({**same, "number": n + 1, **call}) for n, call in enumerate(calls)]


def test_a_server_stops_with_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    """Catches a server's process that left its session, and keeps the GPU."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session=True)"
    program = [sys.executable, "-c", f"{child}; print(p.pid, flush=True); time.sleep(900)"]
    server = Server(program, {}, tmp_path / "log", 1, "m", "key-0123456789", tmp_path)
    pid = int(wait_for(lambda: (tmp_path / "log").read_text().strip(), "its child"))
    server.stop()
    wait_for(lambda: not alive(pid), "the child's end")

"""The HTTP bridge, as the reference's agents use it: from inside a run, and by clients that mean no good.

One run stands for all tests, in the order of this file: no grader works before the last one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for

from autorl_hpc.supervise.bridge import MAX_CONNECTIONS

pytestmark = pytest.mark.xdist_group("bridge")

AGENT = f"""#!/usr/bin/env bash
cd $WORKSPACE
{VARIANTS}
variants 0 4
echo "$GRADING_SERVER_URL" > code/.url && mv code/.url code/url
while [ ! -e code/end ]; do sleep 0.1; done
"""

REFERENCE_FIELDS = {
    *("submission_id", "timestamp", "model_path", "score", "baseline_score", "improvement", "elapsed_seconds"),
    *("best", "total_submissions"),
}


@dataclass
class Client:
    """A client of one run's bridge."""

    url: str
    workspace: Path
    cluster: Cluster
    run_id: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def ask(
        self, path: str, body: Any = None, *, url: str | None = None, timeout_s: float = PATIENCE_S
    ) -> tuple[int, Any]:
        """Status and JSON of one request; a POST if there is a body."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url or self.url}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which `data` was sent and that stays open."""
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        connection.sendall(data)
        return connection

    def assert_answers(self) -> None:
        """The bridge answers a well-behaved client."""
        assert self.ask("/health")[0] == 200

    def accepted(self, paths: set[str]) -> bool:
        """Whether these checkpoints are in the ledger."""
        return paths <= {str(s.model_path) for s in self.cluster.view(self.run_id).accepted()}


@pytest.fixture(scope="module")
def client(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A running run on the task `mini` whose agent waits; no grader yet."""
    cluster = Cluster(staged, tmp_path_factory.mktemp("bridge"))
    try:
        cluster.mini_task()
        cluster.agent("waits", AGENT)
        (run_id,) = cluster.prepare(["waits"], matrix={"task": "mini"})
        supervisor, workspace = cluster.supervisor(run_id), cluster.workspace(run_id)
        wait_for((workspace / "code" / "url").exists, what="the agent")
        yield Client((workspace / "code" / "url").read_text().strip(), workspace, cluster, run_id)
        (workspace / "code" / "end").touch()
        assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    finally:
        cluster.end()


def test_token_and_loopback(client: Client) -> None:
    host, port = client.address
    assert host == "127.0.0.1"
    token = client.url.rsplit("/", 1)[1]
    for wrong in ("", "/x", f"/{token[:-1]}", f"/{token}x", "/%00", "/%C3%A9"):
        for body in (None, {"model_path": "output/v0"}):
            status, answer = client.ask("/submit" if body else "/health", body, url=f"http://{host}:{port}{wrong}")
            assert (status, answer) == (404, {"error": "Not found"}), wrong
    assert not client.cluster.view(client.run_id).accepted()
    # Bound to the loopback alone: /proc/net/tcp shows local addresses as little-endian hex.
    tables = [path.read_text() for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert listening == {f"0100007F:{port:04X}"}
    for text in (client.cluster.logs(), client.cluster.run_dir(client.run_id).events.read_text()):
        assert token not in text


def test_small_requests(client: Client) -> None:
    status, answer = client.ask("/submit", {"model_path": "output/v0", "wait": False})
    assert (status, answer["status"], answer["score"]) == (200, "accepted", None)

    wrong = [{}, {"model_path": ""}, {"model_path": 7}, {"path": "output/v0"}, [], "output/v0", None, 3]
    broken = [b"{", b"\xff\xfe", b"[" * 60_000, b'{"model_path": "x"', b""]
    for data in [*(json.dumps(body).encode() for body in wrong), *broken]:
        status, answer = client.ask("/submit", data)
        assert (status, answer) == (400, {"error": "Missing model_path"}), data[:20]
    status, answer = client.ask("/submit", b'{"model_path": "output/\\ud800"}')
    assert status == 400
    for path in ("/etc", "output/../../..", "output/none"):
        status, answer = client.ask("/submit", {"model_path": path})
        assert status == 400 and answer["status"] == "refused" and answer["advice"]

    status, clock = client.ask("/time")
    assert status == 200
    assert set(clock) >= {"timeout_s", "start_time", "now", "remaining", "last_submit_time"}
    assert clock["timeout_s"] == 3600 and 0 < clock["remaining"] < 3600
    assert clock["start_time"] <= clock["now"]
    status, health = client.ask("/health")
    assert status == 200
    assert (health["status"], health["task"], health["workspace"]) == ("ok", "mini", str(client.workspace))
    assert isinstance(health["available_gpus"], list)

    status, answer = client.ask("/set_baseline", {"score": 0})
    assert status == 403 and "can't be set" in answer["error"]
    assert client.ask("/scores.json")[0] == 404


def test_bad_clients_hang_nobody(client: Client) -> None:
    token = client.url.rsplit("/", 1)[1].encode()
    post = b"POST /" + token + b"/submit HTTP/1.1\r\nHost: x\r\n"
    slow = [
        client.raw(b""),  # says nothing
        client.raw(b"GET /" + token),  # half a request line
        client.raw(post + b"Content-Length: 100\r\n\r\n{"),  # half a body
        client.raw(post + b"Content-Length: 100\r\n"),  # half a header
    ]
    client.assert_answers()
    for header in (
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: many\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ):
        with client.raw(post + header) as connection:
            said = b""
            while part := connection.recv(65536):  # it answers and closes by itself
                said += part
            assert said.startswith(b"HTTP/1.1 400"), (header, said)
            assert said.count(b"HTTP/1.1") == 1, said
    huge = client.raw(post + b"Content-Length: 50000000\r\n\r\n")
    huge.settimeout(PATIENCE_S)
    with pytest.raises(OSError):  # nobody reads them: the connection is closed
        for _ in range(1000):
            huge.sendall(b"x" * 65536)
    client.assert_answers()
    gone = client.raw(post + b'Content-Length: 27\r\n\r\n{"model_path": "output/v1"}\n')
    gone.close()  # a client that doesn't wait for its answer has submitted all the same
    wait_for(lambda: client.accepted({"output/v1"}), what="the submission")
    # More connections than the supervisor gives places: they are closed, and its ledger and intake go on.
    many = [client.raw(b"GET /" + token) for _ in range(2 * MAX_CONNECTIONS)]
    # Catches other runs' agents that keep all places: connections without the token give way, so that it answers meanwhile.
    foreign = [client.raw(b"GET /x") for _ in range(2 * MAX_CONNECTIONS)]
    for _ in range(3):
        assert client.ask("/health", timeout_s=PATIENCE_S)[0] == 200
    for connection in [*slow, *many, *foreign]:
        connection.close()
    (client.workspace / "submissions" / ".tmp-m").write_text('{"schema_version": 1, "model_path": "output/v2"}')
    (client.workspace / "submissions" / ".tmp-m").rename(client.workspace / "submissions" / "m.json")
    wait_for(lambda: client.accepted({"output/v2"}), "intake after the flood")


def test_submit_is_held_open_until_the_score_is_there(client: Client) -> None:
    answers: dict[str, tuple[int, Any]] = {}
    began, cluster, before = int(time.time()), client.cluster, client.cluster.view(client.run_id).submissions

    def submit(path: str) -> None:
        answers[path] = client.ask("/submit", {"model_path": path, "final": path == "output/v3"})

    paths = [str(client.workspace / "output" / "v0"), "output/v3"]
    threads = [threading.Thread(target=submit, args=(path,), daemon=True) for path in paths]
    for number, thread in enumerate(threads, len(before) + 1):
        thread.start()
        wait_for(lambda number=number: len(cluster.view(client.run_id).submissions) == number, what="the submission")
    time.sleep(1)
    assert answers == {}  # accepted, and still held
    client.assert_answers()
    submitted = time.time()
    cluster.grader()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {status for status, _ in answers.values()} == {200}
    view = cluster.view(client.run_id)
    for path in paths:
        answer = answers[path][1]
        assert set(answer) >= REFERENCE_FIELDS and answer["status"] == "scored"
        assert answer["model_path"] == path.removeprefix(f"{client.workspace}/")
        assert answer["improvement"] == pytest.approx(answer["score"] - answer["baseline_score"])
        assert set(answer["best"]) == {"submission_id", "model_path", "score"}
        assert answer["total_submissions"] == len(before) + 2 and answer["elapsed_seconds"] > 0
        submission = view.submissions[answer["submission_id"]]
        score = view.score_of(submission)
        assert score is not None and score.evaluation.score == answer["score"], "the bridge tells what the ledger holds"
        assert submission.final == (path == "output/v3")
    assert began <= client.ask("/time")[1]["last_submit_time"] <= submitted
    # The same content again is answered from the ledger, though the grader may be gone.
    status, again = client.ask("/submit", {"model_path": "output/v3"})
    assert (status, again["score"]) == (200, answers["output/v3"][1]["score"]) and again["same_as"]

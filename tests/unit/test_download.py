"""Downloads from a real server on loopback that breaks off, lies, is busy and hangs; on a full disk; with the Hub's token."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
import web_server
from helpers import wait_for
from web_server import QUICK, Answer, LoopbackServer, code, cut, hangs, served, to, whole

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage.download import NoNetwork, Pin, fetch
from autorl_hpc.stage.sources import HttpSource, address_of, hub_file, hub_token

DATA = bytes(range(256)) * 1000
SHA = hashlib.sha256(DATA).hexdigest()
OTHER = DATA[:-1] + b"\0"
GIT = Pin(git_sha1=hashlib.sha1(b"blob 256000\0" + DATA).hexdigest(), size_bytes=len(DATA))
"""It waits for an answer as long as a busy machine may need for one, and not between two tries."""

server = web_server.server
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_secretsecretsecret"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def get(
    server: LoopbackServer,
    place: Path,
    *answers: Answer,
    pin: Pin = Pin(sha256=SHA),  # noqa: B008
) -> str:
    """Fetch /file, which the server answers in turn by `answers`, and return what was said."""
    (place / "file").unlink(missing_ok=True)
    if answers:
        server.answers["/file"] = list(answers)
    server.seen.clear()
    lines: list[str] = []
    fetch(HttpSource(server.url("/file")), place / "file", pin, say=lines.append, patience=QUICK)
    assert (place / "file").read_bytes() == DATA
    return "\n".join(lines)


def fails(server: LoopbackServer, place: Path, *answers: Answer, pin: Pin = Pin(sha256=SHA)) -> AutorlError:  # noqa: B008
    with pytest.raises(AutorlError) as caught:
        get(server, place, *answers, pin=pin)
    assert caught.value.next_step and not (place / "file").exists()
    return caught.value


def asked(server: LoopbackServer) -> list[str | None]:
    return [headers.get("Range") for headers in server.seen_at("/file")]


def left(place: Path) -> list[str]:
    return sorted(name for name in os.listdir(place) if not name.endswith(".lock"))


def test_what_is_there_is_not_fetched_again(server: LoopbackServer, place: Path) -> None:
    get(server, place, whole(DATA))
    address = HttpSource(server.url("/file"))
    server.seen.clear()
    for pin in (Pin(sha256=SHA), GIT):
        fetch(address, place / "file", pin, patience=QUICK)
    assert not server.seen and left(place) == ["file"]
    (place / "file").write_bytes(OTHER)
    fetch(address, place / "file", Pin(sha256=SHA), patience=QUICK)
    assert (place / "file").read_bytes() == DATA


def test_a_broken_connection_goes_on_where_it_broke(server: LoopbackServer, place: Path) -> None:
    said = get(server, place, cut(DATA, 100_000), cut(DATA, 50_000), whole(DATA))
    assert "broke off at 100000 of 256000 bytes" in said
    assert asked(server) == [None, "bytes=100000-", "bytes=150000-"]
    error = fails(server, place, cut(DATA, 1000), cut(DATA, 1000), cut(DATA, 1000), code(500))
    assert "could not be downloaded: the connection broke off" in error.what and "goes on" in (error.next_step or "")
    assert error.exit_code is Exit.ENVIRONMENT and left(place) == [".tmp-file.part"]
    get(server, place, whole(DATA))
    assert asked(server) == ["bytes=3000-"] and left(place) == ["file"]


def test_a_killed_download_goes_on(server: LoopbackServer, place: Path) -> None:
    server.answers["/file"] = [hangs(DATA, 70_000)]
    child = os.fork()
    if child == 0:
        try:
            fetch(HttpSource(server.url("/file")), place / "file", Pin(sha256=SHA), patience=QUICK)
        finally:
            os._exit(3)
    part = place / ".tmp-file.part"
    wait_for(lambda: part.exists() and part.stat().st_size == 70_000, "what the server sends")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    get(server, place, whole(DATA))
    assert asked(server) == ["bytes=70000-"]
    part.write_bytes(DATA)  # killed right before the rename
    get(server, place, code(404))
    assert not server.seen


def test_a_wrong_file_is_removed_and_both_hashes_are_said(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, whole(OTHER))
    assert hashlib.sha256(OTHER).hexdigest() in error.what and SHA in error.what
    assert error.exit_code is Exit.FAILED and left(place) == [] and len(server.seen) == 1
    assert "has git hash" in fails(server, place, whole(OTHER), pin=GIT).what


def test_a_busy_server_is_left_alone_as_long_as_it_asks(server: LoopbackServer, place: Path) -> None:
    started = time.monotonic()
    assert "answers 429; again in 1 s" in get(server, place, code(429, Retry_After="1"), code(503), whole(DATA))
    assert time.monotonic() - started >= 1.0
    error = fails(server, place, code(429, Retry_After="3600"))
    assert "answers 429 and asks to wait 3600 s (1 tries)" in error.what and len(server.seen) == 1
    assert "answers 500 (3 tries)" in fails(server, place, code(500)).what and len(server.seen) == 3


@pytest.mark.parametrize("number", [400, 401, 403, 404, 410, 451])
def test_a_refusal_is_final(server: LoopbackServer, place: Path, number: int) -> None:
    error = fails(server, place, code(number))
    assert f"answers {number}" in error.what and len(server.seen) == 1 and error.where == server.url("/file")


# --- no network, proxies, redirects


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and that nobody else gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "no-such-host.invalid"])
def test_a_node_without_network_says_so(server: LoopbackServer, place: Path, closed_port: int, host: str) -> None:
    url = "http://" + host.format(port=closed_port) + "/file?key=abc"
    with pytest.raises(NoNetwork, match="this node can't reach") as caught:
        fetch(HttpSource(url), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert "login node" in (caught.value.next_step or "") and "--from DIR" in (caught.value.next_step or "")
    assert "abc" not in str(caught.value) and caught.value.exit_code is Exit.ENVIRONMENT and not left(place)


def test_redirects_are_followed_and_end(server: LoopbackServer, place: Path) -> None:
    server.answers["/elsewhere"] = [cut(DATA, 1000), whole(DATA)]
    get(server, place, to(server.url("/elsewhere")))
    assert [headers.get("Range") for headers in server.seen_at("/elsewhere")] == [None, "bytes=1000-"]
    assert "answers 302" in fails(server, place, to(server.url("/file"))).what
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"):
        fails(server, place, to(url))


def test_from_https_only_https_is_followed(
    server: LoopbackServer, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        needs.skip("openssl", "needs openssl for a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    with served((certificate, key)) as safe:
        with pytest.raises(AutorlError, match="certificate can't be verified"):
            fetch(HttpSource(safe.url("/good")), place / "file", Pin(sha256=SHA), patience=QUICK)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        safe.answers["/good"] = [whole(DATA)]
        safe.answers["/to-https"] = [to(safe.url("/good"))]
        fetch(HttpSource(safe.url("/to-https")), place / "file", Pin(sha256=SHA), patience=QUICK)
        safe.answers["/to-http"] = [to(server.url("/file"))]
        server.answers["/file"] = [whole(DATA)]
        with pytest.raises(AutorlError, match="only https is followed"):
            fetch(HttpSource(safe.url("/to-http")), place / "other", Pin(sha256=SHA), patience=QUICK)
    assert not server.seen


# --- the Hub's token goes nowhere else and stands in no message


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: LoopbackServer) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(path))
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    return path


def gated(then: Answer) -> Answer:
    def answer(handler: object) -> None:
        if handler.headers.get("Authorization") == f"Bearer {SECRET}":  # type: ignore[attr-defined]
            then(handler)  # type: ignore[arg-type]
        else:
            handler.plain(401, b"who are you")  # type: ignore[attr-defined]

    return answer


def test_the_token_is_shown_to_the_hub_alone_once_it_asks(server: LoopbackServer, token: Path, place: Path) -> None:
    address = hub_file("org/m", "v1", "w")
    server.answers["/org/m/resolve/v1/w"] = [whole(DATA)]
    fetch(address, place / "open", Pin(sha256=SHA), patience=QUICK)
    assert "Authorization" not in server.seen[0][1], "it was not asked for"
    server.seen.clear()
    with served() as cdn:
        cdn.answers["/blob"] = [whole(DATA)]
        server.answers["/org/m/resolve/v1/w"] = [gated(to(server.url("/here")))]
        server.answers["/here"] = [gated(to(cdn.url("/blob")))]
        fetch(address, place / "file", Pin(sha256=SHA), patience=QUICK)
        assert [path for path, _ in cdn.seen] == ["/blob"]
        assert not any(SECRET in value for _, headers in cdn.seen for value in headers.values())
        shown = [headers.get("Authorization") for headers in server.seen_at("/org/m/resolve/v1/w")]
        assert shown == [None, f"Bearer {SECRET}"]
        cdn.answers["/file"] = [code(401)]
        cdn.seen.clear()
        with pytest.raises(AutorlError, match="answers 401"):
            fetch(address_of(cdn.url("/file")) or HttpSource(""), place / "other", Pin(sha256=SHA), patience=QUICK)
        assert len(cdn.seen) == 1 and "Authorization" not in cdn.seen[0][1]


def test_a_refused_token_stands_in_no_message(server: LoopbackServer, token: Path, place: Path) -> None:
    server.answers["/org/m/resolve/v1/w"] = [code(403)]
    lines: list[str] = []
    with pytest.raises(AutorlError, match="gated and your token doesn't open it") as caught:
        fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), say=lines.append, patience=QUICK)
    assert SECRET not in f"{caught.value}{caught.value.as_json()}{lines}" and len(server.seen) == 2


def test_a_token_file_that_holds_no_token(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "two words", "a\nb", "é", "x" * 5000):
        token.write_text(content)
        with pytest.raises(AutorlError, match="must hold the token alone") as caught:
            hub_token()
        assert caught.value.where == str(token) and (not content or content not in str(caught.value))
    token.unlink()
    with pytest.raises(AutorlError, match="can't be read"):
        hub_token()
    monkeypatch.delenv("HF_TOKEN_PATH")
    assert hub_token() is None


# --- addresses, progress


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("hf://org/name@v1/a b.json", "https://huggingface.co/org/name/resolve/v1/a%20b.json"),
        (f"hf://datasets/o/n@{COMMIT}/d/x.csv", f"https://huggingface.co/datasets/o/n/resolve/{COMMIT}/d/x.csv"),
        ("https://host/x?y=1", "https://host/x?y=1"),
        ("https://github.com/o/r/blob/abc/d/x.json", "https://raw.githubusercontent.com/o/r/abc/d/x.json"),
        ("https://github.com/o/r/releases/download/v1/x.zip", "https://github.com/o/r/releases/download/v1/x.zip"),
        ("https://github.com/o/r", None),
        ("https://github.com/o/r/tree/abc/d", None),
        ("https://github.com/o/r/blob/abc/x.py (through bin/make)", None),
        ("the web page of the authors", None),
        ("ftp://host/x", None),
    ],
)
def test_addresses(text: str, url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = address_of(text)
    assert (found.url if found else None) == url
    assert found is None or found.hub == ("huggingface" in found.url)


@pytest.mark.parametrize("text", ["hf://name@v1/x", "hf://org/name/x", "hf://org/name@/x", "hf://org/name@v1/../../x", "hf://org/name@a/b/c/..", "https://u:p@h/x"])  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(AutorlError) as caught:
        address_of(text)
    assert "u:p" not in str(caught.value) and caught.value.next_step


def test_a_disk_that_fills_up_keeps_the_part(server: LoopbackServer, place: Path) -> None:
    """A limit of a file's size stands for the disk: the write that passes it fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        error = fails(server, place, whole(DATA))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in error.what and error.exit_code is Exit.ENVIRONMENT
    get(server, place, whole(DATA))
    assert asked(server) == ["bytes=100000-"] and (place / "file").read_bytes() == DATA

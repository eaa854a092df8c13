"""Downloads from a real server on loopback that breaks off, lies, is busy and hangs; and a token that goes nowhere else."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
from helpers import PATIENCE_S, wait_for
from web_server import (
    Answer,
    LoopbackServer,
    clean_environment,
    code,
    cut,
    hangs,
    no_ranges,
    served,
    to,
    whole,
)

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage import space
from autorl_hpc.stage.download import Patience, Pin, fetch
from autorl_hpc.stage.sources import Address, address_of, hub_file, hub_token
from autorl_hpc.stage.web import NoNetwork, range_start, range_total, retry_after_s
from autorl_hpc.stage.work import alone

DATA = bytes(range(256)) * 1000
SHA = hashlib.sha256(DATA).hexdigest()
OTHER = DATA[:-1] + b"\0"
QUICK = Patience(tries=3, timeout_s=PATIENCE_S, first_pause_s=0.01, longest_pause_s=0.02, longest_wait_s=1.5)
"""It waits for an answer as long as a busy machine may need for one, and not between two tries."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_secretsecretsecret"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    clean_environment(monkeypatch, tmp_path)
    with served() as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def get(
    server: LoopbackServer, place: Path, *answers: Answer, pin: Pin | None = None, patience: Patience = QUICK
) -> tuple[str, str]:
    """Fetches /file, which the server answers in turn by `answers`; returns its sha256 and what was said."""
    if answers:
        server.answers["/file"] = list(answers)
    lines: list[str] = []
    wanted = Pin(sha256=SHA) if pin is None else pin
    done = fetch(Address(server.url("/file")), place / "file", wanted, say=lines.append, patience=patience)
    return done.sha256, "\n".join(lines)


def fails(server: LoopbackServer, place: Path, *answers: Answer, pin: Pin | None = None) -> AutorlError:
    with pytest.raises(AutorlError) as caught:
        get(server, place, *answers, pin=pin)
    assert caught.value.next_step and not (place / "file").exists()
    return caught.value


def left(place: Path) -> list[str]:
    return sorted(os.listdir(place))


def test_a_file_comes_in(server: LoopbackServer, place: Path) -> None:
    assert get(server, place, whole(DATA)) == (SHA, "")
    assert (place / "file").read_bytes() == DATA and left(place) == ["file"]


def test_what_is_there_is_not_fetched_again(server: LoopbackServer, place: Path) -> None:
    (place / "file").write_bytes(DATA)
    get(server, place, code(404))
    assert not server.seen
    (place / "file").write_bytes(OTHER)
    get(server, place, whole(DATA))
    assert (place / "file").read_bytes() == DATA


def test_a_broken_connection_goes_on_where_it_broke(server: LoopbackServer, place: Path) -> None:
    sha, said = get(server, place, cut(DATA, 100_000), cut(DATA, 50_000), whole(DATA))
    assert sha == SHA and "broke off at 100000 of 256000 bytes" in said
    asked = [headers.get("Range") for headers in server.seen_at("/file")]
    assert asked == [None, "bytes=100000-", "bytes=150000-"]
    assert server.seen_at("/file")[1]["If-Range"] == '"v1"'


def test_the_next_command_goes_on_too(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, cut(DATA, 1000), cut(DATA, 1000), cut(DATA, 1000), code(500))
    assert "could not be downloaded: the connection broke off" in error.what and "goes on" in (error.next_step or "")
    assert error.exit_code is Exit.ENVIRONMENT
    assert left(place) == [".tmp-file.part", ".tmp-file.part.json"]
    server.seen.clear()
    assert get(server, place, whole(DATA))[0] == SHA and left(place) == ["file"]
    assert [headers.get("Range") for headers in server.seen_at("/file")] == ["bytes=3000-"]


def test_a_killed_download_goes_on(server: LoopbackServer, place: Path) -> None:
    server.answers["/file"] = [hangs(DATA, 70_000)]
    child = os.fork()
    if child == 0:
        try:
            fetch(Address(server.url("/file")), place / "file", Pin(sha256=SHA), patience=QUICK)
        finally:
            os._exit(3)
    part = place / ".tmp-file.part"
    wait_for(lambda: part.exists() and part.stat().st_size == 70_000, "what the server sends")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert left(place) == [".tmp-file.part", ".tmp-file.part.json"]
    server.seen.clear()
    assert get(server, place, whole(DATA))[0] == SHA
    assert [headers.get("Range") for headers in server.seen_at("/file")] == ["bytes=70000-"]


def test_killed_right_before_the_rename(server: LoopbackServer, place: Path) -> None:
    (place / ".tmp-file.part").write_bytes(DATA)
    assert get(server, place, whole(DATA))[0] == SHA
    assert [headers["Range"] for headers in server.seen_at("/file")] == ["bytes=256000-"]
    (place / "file").unlink()
    (place / ".tmp-file.part").write_bytes(DATA)
    server.seen.clear()
    get(server, place, code(404), pin=Pin(sha256=SHA, size_bytes=len(DATA)))
    assert not server.seen, "its size is known: there is nothing to ask for"


def test_a_part_of_another_version_is_thrown_away(server: LoopbackServer, place: Path) -> None:
    fails(server, place, cut(OTHER, 1000, '"v0"'), code(500))
    assert get(server, place, whole(DATA))[0] == SHA
    (place / "file").unlink()
    (place / ".tmp-file.part").write_bytes(b"x" * 1000)  # nothing is known of it, and the server can't tell either
    sha, said = get(server, place, whole(DATA))
    assert sha == SHA and "the parts don't make the whole; from the start" in said


def test_without_a_pin_only_the_server_s_tag_joins_parts(server: LoopbackServer, place: Path) -> None:
    (place / ".tmp-file.part").write_bytes(b"x" * 1000)
    assert get(server, place, whole(DATA), pin=Pin())[0] == SHA
    assert "Range" not in server.seen_at("/file")[0]
    (place / "file").unlink()
    get(server, place, cut(DATA, 1000, 'W/"weak"'), whole(DATA), pin=Pin())
    assert all("Range" not in headers for headers in server.seen_at("/file"))
    (place / "file").unlink()
    get(server, place, cut(DATA, 1000), whole(DATA), pin=Pin())
    assert server.seen_at("/file")[-1]["Range"] == "bytes=1000-"


def test_a_server_without_ranges_sends_it_whole(server: LoopbackServer, place: Path) -> None:
    sha, said = get(server, place, cut(DATA, 1000), no_ranges(DATA))
    assert sha == SHA and "whole or not at all; from the start" in said


def test_a_server_that_goes_on_elsewhere_is_not_believed(server: LoopbackServer, place: Path) -> None:
    def elsewhere(handler: object) -> None:
        handler.plain(206, DATA[5:], Content_Range=f"bytes 5-{len(DATA) - 1}/{len(DATA)}")  # type: ignore[attr-defined]

    assert get(server, place, cut(DATA, 1000), elsewhere, whole(DATA))[0] == SHA


def test_a_wrong_file_is_removed_and_both_hashes_are_said(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, whole(OTHER))
    assert hashlib.sha256(OTHER).hexdigest() in error.what and SHA in error.what
    assert error.exit_code is Exit.FAILED and left(place) == []
    assert len(server.seen) == 1


def test_a_git_hash_is_checked_too(server: LoopbackServer, place: Path) -> None:
    pin = Pin(git_sha1=hashlib.sha1(b"blob 256000\0" + DATA).hexdigest(), size_bytes=len(DATA))
    get(server, place, whole(DATA), pin=pin)
    (place / "file").unlink()
    assert "has git hash" in fails(server, place, whole(OTHER), pin=pin).what
    (place / "file").write_bytes(DATA)
    server.seen.clear()
    get(server, place, pin=pin)
    assert not server.seen


def announces(length: int, body: bytes) -> Answer:
    def answer(handler: object) -> None:
        handler.close_connection = True  # type: ignore[attr-defined]
        handler.plain(200, body, Content_Length=str(length))  # type: ignore[attr-defined]

    return answer


@pytest.mark.parametrize(
    ("length", "size", "words"),
    [
        (256_010, None, "the connection broke off at"),
        (1000, None, "has sha256"),
        (256_010, 256_000, "the server has 256010 bytes of file, expected are 256000"),
        (10, 256_000, "the server has 10 bytes of file, expected are 256000"),
    ],
)
def test_a_wrong_content_length(server: LoopbackServer, place: Path, length: int, size: int | None, words: str) -> None:
    assert words in fails(server, place, announces(length, DATA), pin=Pin(sha256=SHA, size_bytes=size)).what


def test_more_than_the_known_size_is_not_written(server: LoopbackServer, place: Path) -> None:
    def endless(handler: object) -> None:
        handler.send_response(200)  # type: ignore[attr-defined]
        handler.send_header("Connection", "close")  # type: ignore[attr-defined]
        handler.end_headers()  # type: ignore[attr-defined]
        handler.close_connection = True  # type: ignore[attr-defined]
        for _ in range(100):
            handler.wfile.write(DATA)  # type: ignore[attr-defined]

    error = fails(server, place, endless, pin=Pin(sha256=SHA, size_bytes=len(DATA)))
    assert "sends more than the 256000 bytes" in error.what


@pytest.mark.parametrize("number", [429, 503])
def test_a_busy_server_is_left_alone_as_long_as_it_asks(server: LoopbackServer, place: Path, number: int) -> None:
    started = time.monotonic()
    sha, said = get(server, place, code(number, Retry_After="1"), whole(DATA))
    assert sha == SHA and f"answers {number}; again in 1 s" in said
    assert time.monotonic() - started >= 1.0


def test_a_server_that_asks_for_an_hour_is_told_to_the_user(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, code(429, Retry_After="3600"))
    assert "answers 429 and asks to wait 3600 s (1 tries)" in error.what and len(server.seen) == 1


def test_errors_of_the_server_are_borne_so_many_times(server: LoopbackServer, place: Path) -> None:
    assert get(server, place, code(500), code(502), whole(DATA))[0] == SHA
    (place / "file").unlink()
    server.seen.clear()
    assert "answers 500 (3 tries)" in fails(server, place, code(500)).what
    assert len(server.seen) == 3


@pytest.mark.parametrize("number", [400, 401, 403, 404, 410, 451])
def test_a_refusal_is_final(server: LoopbackServer, place: Path, number: int) -> None:
    error = fails(server, place, code(number))
    assert f"answers {number}" in error.what and len(server.seen) == 1 and error.where == server.url("/file")


def test_a_server_that_hangs_is_asked_again(server: LoopbackServer, place: Path) -> None:
    sha, said = get(server, place, hangs(DATA, 1000), whole(DATA), patience=replace(QUICK, timeout_s=2.0))
    assert sha == SHA and "no answer in time" in said
    assert server.seen_at("/file")[1]["Range"] == "bytes=1000-"


def test_packed_bytes_are_refused(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, lambda handler: handler.plain(200, DATA, Content_Encoding="gzip"))
    assert "sends it packed (gzip)" in error.what


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
        fetch(Address(url), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert "login node" in (caught.value.next_step or "") and "--from DIR" in (caught.value.next_step or "")
    assert "abc" not in str(caught.value) and caught.value.exit_code is Exit.ENVIRONMENT
    assert not (place / "file").exists()


def test_proxies_of_the_environment_are_used(
    server: LoopbackServer, place: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url())
    server.answers["http://files.invalid/file"] = [whole(DATA)]
    fetch(Address("http://files.invalid/file"), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert server.seen[0][0] == "http://files.invalid/file"
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(NoNetwork):
        fetch(Address("https://files.invalid/other"), place / "other", Pin(sha256=SHA), patience=QUICK)


def test_redirects_are_followed(server: LoopbackServer, place: Path) -> None:
    server.answers["/elsewhere"] = [cut(DATA, 1000), whole(DATA)]
    assert get(server, place, to(server.url("/elsewhere")))[0] == SHA
    assert [headers.get("Range") for headers in server.seen_at("/elsewhere")] == [None, "bytes=1000-"]


def test_a_redirect_in_a_circle_ends(server: LoopbackServer, place: Path) -> None:
    assert "answers 302" in fails(server, place, to(server.url("/file"))).what


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"])
def test_a_redirect_to_something_else_is_refused(server: LoopbackServer, place: Path, url: str) -> None:
    fails(server, place, to(url))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl for a certificate")
    made = (tmp_path / "cert.pem", tmp_path / "key.pem")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-out", str(made[0]), "-keyout", str(made[1])],
        check=True,
        capture_output=True,
    )
    return made


def test_from_https_only_https_is_followed(
    server: LoopbackServer, place: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(certificate) as safe:
        safe.answers["/good"] = [whole(DATA)]
        with pytest.raises(AutorlError, match="certificate can't be verified") as caught:
            fetch(Address(safe.url("/good")), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert "SSL_CERT_FILE" in (caught.value.next_step or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        safe.answers["/to-https"] = [to(safe.url("/good"))]
        fetch(Address(safe.url("/to-https")), place / "file", Pin(sha256=SHA), patience=QUICK)
        safe.answers["/to-http"] = [to(server.url("/file"))]
        server.answers["/file"] = [whole(DATA)]
        with pytest.raises(AutorlError, match="only https is followed"):
            fetch(Address(safe.url("/to-http")), place / "other", Pin(sha256=SHA), patience=QUICK)
    assert not server.seen


# --- the disk ---


def test_a_full_disk_is_seen_before_anything_is_written(
    server: LoopbackServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(place)
    blocks = (100_000 + space.RESERVE_BYTES) // real.f_frsize
    fields = [*real[:4], blocks, *real[5:]]
    monkeypatch.setattr(space.os, "statvfs", lambda path: os.statvfs_result(fields))
    error = fails(server, place, whole(DATA))
    assert "file needs 256.0 kB, and" in error.what and "are missing" in error.what
    assert error.exit_code is Exit.ENVIRONMENT and left(place) == []


def test_a_disk_that_fills_up_keeps_the_part(server: LoopbackServer, place: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "none", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs a tmpfs of its own: mount is not allowed here")
    try:

        def unannounced(handler: object) -> None:
            handler.send_response(200)  # type: ignore[attr-defined]
            handler.end_headers()  # type: ignore[attr-defined]
            handler.close_connection = True  # type: ignore[attr-defined]
            handler.wfile.write(DATA * 20)  # type: ignore[attr-defined]

        error = fails(server, small, unannounced, pin=Pin())
        assert "No space left on device" in error.what and error.exit_code is Exit.ENVIRONMENT
        assert (small / ".tmp-file.part").stat().st_size > 1_000_000
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_two_downloads_of_one_file_do_not_mix(server: LoopbackServer, place: Path) -> None:
    with (
        alone(place / ".tmp-file.part", "downloading this file"),
        pytest.raises(AutorlError, match="another process is downloading this file"),
    ):
        get(server, place, whole(DATA))
    assert get(server, place)[0] == SHA


# --- the Hub's token ---


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


def test_a_gated_file_is_had_with_the_token_and_no_other_host_sees_it(
    server: LoopbackServer, token: Path, place: Path
) -> None:
    with served() as cdn:
        cdn.answers["/blob"] = [whole(DATA)]
        server.answers["/org/m/resolve/v1/w"] = [gated(to(server.url("/here")))]
        server.answers["/here"] = [gated(to(cdn.url("/blob")))]
        fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert [path for path, _ in cdn.seen] == ["/blob"]
        assert not any("authorization" in name.lower() for _, headers in cdn.seen for name in headers)
        assert not any(SECRET in value for _, headers in cdn.seen for value in headers.values())
    asked = [headers.get("Authorization") for headers in server.seen_at("/org/m/resolve/v1/w")]
    assert asked == [None, f"Bearer {SECRET}"], "it is shown once it is asked for"


def test_an_open_file_is_had_without_the_token(server: LoopbackServer, token: Path, place: Path) -> None:
    server.answers["/org/m/resolve/v1/w"] = [whole(DATA)]
    fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert "Authorization" not in server.seen[0][1]


def test_other_servers_are_not_shown_the_token(server: LoopbackServer, token: Path, place: Path) -> None:
    with served() as other:
        other.answers["/file"] = [code(401)]
        with pytest.raises(AutorlError, match="answers 401"):
            fetch(address_of(other.url("/file")) or Address(""), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert len(other.seen) == 1 and "Authorization" not in other.seen[0][1]


def test_a_refused_token_stands_in_no_message(server: LoopbackServer, token: Path, place: Path) -> None:
    server.answers["/org/m/resolve/v1/w"] = [code(403)]
    lines: list[str] = []
    with pytest.raises(AutorlError, match="gated and your token doesn't open it") as caught:
        fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), say=lines.append, patience=QUICK)
    assert SECRET not in f"{caught.value}{caught.value.as_json()}{lines}"
    assert len(server.seen) == 2


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "é", "x" * 5000])
def test_a_token_file_that_holds_something_else(token: Path, content: str) -> None:
    token.write_text(content)
    with pytest.raises(AutorlError, match="must hold the token alone") as caught:
        hub_token()
    assert caught.value.where == str(token) and (not content or content not in str(caught.value))


def test_a_token_file_that_is_not_there(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token.unlink()
    with pytest.raises(AutorlError, match="can't be read"):
        hub_token()
    monkeypatch.delenv("HF_TOKEN_PATH")
    assert hub_token() is None


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("hf://org/name@v1/a b.json", "https://huggingface.co/org/name/resolve/v1/a%20b.json"),
        (
            f"hf://datasets/org/name@{COMMIT}/d/x.csv",
            f"https://huggingface.co/datasets/org/name/resolve/{COMMIT}/d/x.csv",
        ),
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


@pytest.mark.parametrize(
    "text",
    [
        "hf://name@v1/x",
        "hf://org/name/x",
        "hf://org/name@/x",
        "hf://org/name@v1/../../x",
        "hf://org/name@a/b/c/..",
        "https://u:p@h/x",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(AutorlError) as caught:
        address_of(text)
    assert "u:p" not in str(caught.value) and caught.value.next_step


def test_a_mirror_stands_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert hub_file("org/m", "v1", "x").url == "https://mirror.example/hub/org/m/resolve/v1/x"
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    with pytest.raises(AutorlError, match="HF_ENDPOINT is no address"):
        hub_file("org/m", "v1", "x")


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("5", 5.0), ("-3", 0.0), ("soon", None), ("", None), ("nan", 0.0)]
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    found = retry_after_s(formatdate(time.time() + 100, usegmt=True))
    assert found is not None and 90 < found < 101
    assert retry_after_s(formatdate(0, usegmt=True)) == 0.0


@pytest.mark.parametrize(
    ("value", "start", "total"),
    [
        ("bytes 5-9/10", 5, 10),
        ("bytes */10", None, 10),
        ("bytes 5-9/*", 5, None),
        ("", None, None),
        ("bytes x-y/z", None, None),
    ],
)
def test_content_range(value: str, start: int | None, total: int | None) -> None:
    assert (range_start(value), range_total(value)) == (start, total)


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.stage import progress

    lines: list[str] = []
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    shown: Callable[[int, int | None], None]
    with progress.progress("file", lines.append) as shown:
        shown(1500, 3000)
        shown(2_000_000, None)
    assert lines == ["file: 1.5 kB of 3.0 kB (50 %)", "file: 2.0 MB"]

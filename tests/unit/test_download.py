"""Downloads from a real server on loopback that breaks off, lies, is busy and hangs; and on a disk that fills up."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import downloads
import needs
import pytest
from downloads import DATA, OTHER, QUICK, SHA, fails, get, left
from helpers import wait_for
from web_server import (
    Answer,
    LoopbackServer,
    code,
    cut,
    hangs,
    no_ranges,
    whole,
)

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage import sources
from autorl_hpc.stage.download import Pin, fetch
from autorl_hpc.stage.sources import HttpSource, alone

server, place = downloads.server, downloads.place


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
            fetch(HttpSource(server.url("/file")), place / "file", Pin(sha256=SHA), patience=QUICK)
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


@pytest.mark.slow
def test_a_server_that_hangs_is_asked_again(server: LoopbackServer, place: Path) -> None:
    sha, said = get(server, place, hangs(DATA, 1000), whole(DATA), patience=replace(QUICK, timeout_s=2.0))
    assert sha == SHA and "no answer in time" in said
    assert server.seen_at("/file")[1]["Range"] == "bytes=1000-"


def test_packed_bytes_are_refused(server: LoopbackServer, place: Path) -> None:
    error = fails(server, place, lambda handler: handler.plain(200, DATA, Content_Encoding="gzip"))
    assert "sends it packed (gzip)" in error.what


# --- the disk ---


def test_a_full_disk_is_seen_before_anything_is_written(
    server: LoopbackServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(place)
    blocks = (100_000 + sources.RESERVE_BYTES) // real.f_frsize
    fields = [*real[:4], blocks, *real[5:]]
    monkeypatch.setattr(sources.os, "statvfs", lambda path: os.statvfs_result(fields))
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
        needs.skip("mount", "needs a tmpfs of its own: mount is not allowed here")
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

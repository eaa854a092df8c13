"""The log of a driver's calls, and the totals that are added up from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from driver_answers import PATHS

from autorl_hpc.files.safe_open import DriverCall, LogWriter, add_up_calls, read_calls
from autorl_hpc.gateway.accounting import Books, CallRecord
from autorl_hpc.gateway.request import Settings
from autorl_hpc.gateway.token_usage import RequestedSize, UsageMeter


def call(number: int, **fields: Any) -> DriverCall:
    return DriverCall(at="x", number=number, dialect="anthropic", path="/v1/messages", **{"status": 200, **fields})


def put(writer: LogWriter, one: DriverCall) -> bool:
    return writer.write(one.model_dump_json().encode())


def test_totals_are_those_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    writer = LogWriter(path)
    put(writer, call(1, tokens_in=10, tokens_out=2, tokens_cached=4, cost_usd=0.5, elapsed_s=10, total_s=3))
    put(writer, call(2, status=403, refused="hosted_tool"))
    put(writer, call(3, status=500, fault="cluster"))
    put(writer, call(4, tokens_in=20, tokens_out=3, estimated=True, elapsed_s=20, total_s=1))
    put(writer, call(5))
    totals = add_up_calls(read_calls(path))
    assert (totals.calls, totals.refused, totals.failed, totals.estimated, totals.last_number) == (2, 1, 1, 1, 5)
    assert (totals.tokens_in, totals.tokens_out, totals.tokens_cached, totals.cost_usd) == (30, 5, 4, 0.5)
    assert totals.points == ((10.0, 12, 0.5), (20.0, 35, 0.5))
    assert totals.spans == ((7.0, 10.0), (19.0, 20.0))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_request_that_never_ended_counts_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    writer = LogWriter(path)
    for number in (1, 2, 3):
        put(writer, call(number, tokens_in=100, tokens_out=50, estimated=True, under_way=True, status=0))
    put(writer, call(2, tokens_in=10, tokens_out=5))
    put(writer, call(3, status=502, fault="cluster"))
    totals = add_up_calls(read_calls(path))
    assert (totals.tokens_in, totals.tokens_out, totals.calls, totals.estimated) == (110, 55, 2, 1)
    assert (totals.failed, totals.last_number) == (1, 3)


@pytest.mark.parametrize(
    "fields, out",
    [
        ({}, 700),
        ({"reached": False}, None),
        ({"status": 500}, None),
        ({"fault": "cluster"}, None),
        ({"wants": RequestedSize(10, 10, 100_000), "sent_at": -300.0}, 30_000),
        ({"meter": UsageMeter("application/json"), "left": True, "wants": RequestedSize(10, 10, 100_000), "sent_at": -300.0}, 30_000),
    ],
)  # fmt: skip
def test_a_request_that_is_cut_off_is_counted(tmp_path: Path, fields: dict[str, Any], out: int | None) -> None:
    """By the gateway's end, or by its client: what was asked for, or what may have been written in the time."""
    told = {"token": "x" * 16, "upstream": {"url": "http://127.0.0.1:1/v1"}, "model": "m", "log": tmp_path / "log"}
    books = Books(Settings.model_validate(told))
    call = CallRecord("openai-chat", PATHS["openai-chat"], wants=RequestedSize(10, 10, 700), generates=True)
    call.number = books.number()
    books.sending(call)
    for name, value in {"sent_at": 0.0, "reached": True, **fields}.items():
        setattr(call, name, value + time.monotonic() if name == "sent_at" else value)
    books.close(call)
    books.end()
    (line,) = read_calls(tmp_path / "log")
    assert not line.under_way and line.estimated == (out is not None)
    assert (line.tokens_out is None) == (out is None) and (out or 0) <= (line.tokens_out or 0) < (out or 0) + 100


def test_a_damaged_log_loses_only_its_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    put(LogWriter(path), call(1, tokens_in=1, tokens_out=1))
    with open(path, "ab") as file:
        file.write(b'\xff\xfe{"at"\n[1]\n' + b"x" * 100_000 + b'\n{"at": "cut in the mid')
    put(LogWriter(path), call(2, tokens_in=1, tokens_out=1))
    assert [one.number for one in read_calls(path)] == [1, 2]


def test_a_line_of_which_a_part_was_written_comes_again(tmp_path: Path) -> None:
    """As on a full disk: a limit on the file's size takes a part of a write."""
    import resource
    import signal

    writer, path = LogWriter(tmp_path / "driver.jsonl"), tmp_path / "driver.jsonl"
    put(writer, call(1, tokens_in=1, tokens_out=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
        assert not put(writer, call(2, tokens_in=2, tokens_out=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert put(writer, call(3, tokens_in=3, tokens_out=1))
    assert [one.tokens_in for one in read_calls(path)] == [1, 2, 3]

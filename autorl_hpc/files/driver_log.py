"""driver.jsonl: one line for each request to the driver's gateway; what was used of tokens and cost is counted from it.

Before a request is sent a line `under_way` says what it may take, and others what it has taken as its answer grows; the line with the
same number that follows when it has ended stands in their place. Where none follows, the gateway died over it: then the last of them
counts, as an estimate.

Never headers, never bodies. It is appended to by one gateway at a time, and read by the next one and by the report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from autorl_hpc.records.base import Strict

MAX_LINE_BYTES = 16 * 2**10


class DriverCall(Strict):
    """One request. Null: it didn't come so far."""

    at: str = Field(description="When it came, by the node's clock.")
    elapsed_s: float = Field(0.0, ge=0, description="Budget used when it ended, as far as the gateway was told.")
    attempt: int = Field(1, ge=1)
    number: int = Field(ge=1, description="Of the run's requests, all attempts together.")
    dialect: str
    path: str
    model: str | None = None
    stream: bool = False
    status: int = Field(ge=0, description="As the client got it; 0: it had left before.")
    request_bytes: int = Field(0, ge=0)
    answer_bytes: int = Field(0, ge=0)
    first_byte_s: float | None = Field(None, ge=0, description="From the whole request to the answer's first byte.")
    total_s: float = Field(0.0, ge=0)
    tokens_in: int | None = Field(None, ge=0, description="All input, cached input among it.")
    tokens_out: int | None = Field(None, ge=0, description="Reasoning among it.")
    tokens_cached: int | None = Field(None, ge=0, description="Input read from a cache, part of tokens_in.")
    cost_usd: float | None = Field(None, ge=0)
    estimated: bool = Field(
        False, description="The driver did not tell all figures: the answer was cut, or tells none."
    )
    refused: str | None = Field(None, description="The gateway answered in the driver's place: why, in a word.")
    fault: str | None = Field(None, description="Of a request that failed: `cluster` or `agent`.")
    error: str | None = None
    tries: int = Field(0, ge=0, description="How often it was sent or tried to be sent.")
    under_way: bool = Field(
        False,
        description="Written before it was sent, and again as its answer grows; the last one is counted where no line of its end has its number.",
    )
    left: bool = Field(False, description="The client left before the answer's end.")

    @property
    def counted(self) -> bool:
        """Whether the driver worked for it."""
        return self.tokens_in is not None or self.tokens_out is not None


def read_calls(path: Path) -> Iterator[DriverCall]:
    """The lines in their order, one at a time, and at the end those of requests that never ended. Damaged ones are left out. None if the
    file is not there."""
    under_way: dict[int, DriverCall] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                if len(line) > MAX_LINE_BYTES:
                    continue
                try:
                    call = DriverCall.model_validate_json(line)
                except ValidationError:
                    continue
                if call.under_way:
                    under_way[call.number] = call
                    continue
                under_way.pop(call.number, None)
                yield call
    except OSError:
        pass
    yield from under_way.values()


@dataclass(frozen=True)
class DriverTotals:
    """What a run's driver was asked, all attempts together.

    Attributes:
        calls: requests that the driver worked for, or may have: cut answers and those that a provider never answered among them.
        failed: requests that it was asked and did not answer.
        cost_usd: None where there are no prices.
        points: (elapsed_s, tokens in and out so far, cost so far), rising.
        spans: when at least one request was open, in seconds of budget; not joined.
    """

    calls: int
    refused: int
    failed: int
    estimated: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost_usd: float | None
    points: tuple[tuple[float, int, float], ...]
    spans: tuple[tuple[float, float], ...]
    last_number: int


def add_up_calls(calls: Iterable[DriverCall]) -> DriverTotals:
    """The totals of the lines."""
    counted = refused = failed = estimated = given = out = cached = last = 0
    cost, priced, now = 0.0, False, 0.0
    points: list[tuple[float, int, float]] = []
    spans: list[tuple[float, float]] = []
    for call in calls:
        last = max(last, call.number)
        if not call.counted:
            refused += call.refused is not None
            failed += call.refused is None and not 200 <= call.status < 300
            continue
        failed += call.status >= 300
        counted += 1
        estimated += call.estimated
        given += call.tokens_in or 0
        out += call.tokens_out or 0
        cached += call.tokens_cached or 0
        cost += call.cost_usd or 0.0
        priced = priced or call.cost_usd is not None
        now = max(now, call.elapsed_s)
        points.append((now, given + out, cost))
        spans.append((max(0.0, call.elapsed_s - call.total_s), call.elapsed_s))
    return DriverTotals(
        counted,
        refused,
        failed,
        estimated,
        given,
        out,
        cached,
        cost if priced else None,
        tuple(points),
        tuple(spans),
        last,
    )


def read_totals(path: Path) -> DriverTotals | None:
    """The totals of a log; None where there is none, or no request was made."""
    totals = add_up_calls(read_calls(path))
    return totals if totals.last_number else None


class LogWriter:
    """Appends lines. What can't be written now is kept and written with the next one."""

    MAX_KEPT = 100_000

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[bytes] = []

    def write(self, line: bytes) -> bool:
        """Whether everything is on file. `line` has no newline of its own."""
        self._kept.append(line)
        del self._kept[: -self.MAX_KEPT]
        return self.flush()

    def flush(self) -> bool:
        """Writes what is kept."""
        if not self._kept:
            return True
        whole = b"".join(b"%s\n" % line for line in self._kept)
        data = memoryview(whole)
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":  # a cut line of an earlier process
                    os.write(fd, b"\n")
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
        except OSError:
            begun = (
                whole.rfind(b"\n", 0, len(whole) - len(data)) + 1
            )  # a line of which a part was written comes again whole
            self._kept = whole[begun:].splitlines()
            return False
        self._kept = []
        return True

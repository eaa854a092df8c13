"""The gateway's books: what was used, by the log's lines; what each answer is counted as; what the supervisor is told."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from autorl_hpc.files.driver_log import DriverCall, LogWriter, add_up_calls, read_calls
from autorl_hpc.files.masking import masked
from autorl_hpc.gateway.asked import DEFAULT_ANSWER_TOKENS, Asked
from autorl_hpc.gateway.budget import Budget, Totals
from autorl_hpc.gateway.call import Call
from autorl_hpc.gateway.settings import RunLimits, Settings
from autorl_hpc.gateway.usage import Usage
from autorl_hpc.records.names import printable

log = logging.getLogger("autorl_hpc.gateway")

TOKENS_A_SECOND: Final = 100
"""What a driver is taken to have written, hidden thoughts among it, where the client left and the end never came, or the gateway died over
it."""

GROWN_TOKENS: Final = 1000
"""An answer under way has its line written again when it has grown by so much: lines cost disk, and less than this is soon forgotten."""

MAX_REFUSED_LINES: Final = 20_000
"""Of one process. An agent that asks a million times for what is refused fills no disk."""

MAX_UNKNOWN_LINES: Final = 100
"""Without the run's token: anybody on the node may knock."""

MAX_SAID_CHARS: Final = 300
TELL_AGAIN_S: Final = 1.0
UNDER_WAY_S: Final = 10.0


class Books:
    """Of one run. Made before the loop runs; its methods are called in the loop alone."""

    def __init__(self, settings: Settings) -> None:
        earlier = add_up_calls(read_calls(settings.log))
        used = settings.used  # by what an earlier gateway said: the log may lack what it could not write
        totals = Totals(
            max(earlier.tokens_in, used.tokens_in),
            max(earlier.tokens_out, used.tokens_out),
            max(earlier.tokens_cached, used.tokens_cached),
            max(earlier.cost_usd or 0.0, used.cost_usd or 0.0),
            max(earlier.calls, used.calls),
            max(earlier.refused, used.refused),
        )
        self.budget = Budget(settings.limits or RunLimits(), settings.prices, totals)
        self._settings = settings
        self._last = earlier.last_number
        self._log = LogWriter(settings.log)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "driver-log")
        self._elapsed = (settings.elapsed_s, time.monotonic())
        self._refused_lines = self._unknown_lines = 0
        self._untold = False
        self._under_way: dict[int, tuple[Call, int]] = {}
        """By number: the request, and the output that its last line tells."""

    @property
    def keeps_bodies(self) -> bool:
        """Whether request and answer bodies are kept."""
        return self._settings.bodies is not None

    def number(self) -> int:
        """The next request's number."""
        self._last += 1
        return self._last

    def elapsed_told(self, elapsed_s: float) -> None:
        """The supervisor says how much of the budget is used."""
        self._elapsed = (elapsed_s, time.monotonic())

    def elapsed_s(self) -> float:
        """Budget used, by what the supervisor said last."""
        told, at = self._elapsed
        return told + time.monotonic() - at

    # ---------------------------------------------------------------------------------------------------- one request ends

    def sending(self, call: Call) -> None:
        """A line before request `call` is sent, so that a gateway that dies over it doesn't forget it."""
        if call.wants is not None and call.generates:
            self._note(call, self._so_far(call, call.wants))

    def note_growth(self) -> None:
        """Every `UNDER_WAY_S`: another line of each request under way whose answer has grown."""
        for call, told in list(self._under_way.values()):
            assert call.wants is not None
            usage = self._so_far(call, call.wants)
            if (usage.tokens_out or 0) >= told + GROWN_TOKENS:
                self._note(call, usage)

    def _note(self, call: Call, usage: Usage) -> None:
        self._under_way[call.number] = (call, usage.tokens_out or 0)
        line = self._line(call, usage, True, self.budget.cost(usage), under_way=True)
        self._thread.submit(self._put, line, call.number, None)

    def _so_far(self, call: Call, wants: Asked) -> Usage:
        """What request `call` counts as if its end never comes: as output what came, and not less than most answers have or than the
        driver may have written meanwhile, as far as it was asked for."""
        usage = Usage() if call.meter is None else dataclasses.replace(call.meter.usage)
        may_be = max(DEFAULT_ANSWER_TOKENS, self._in_the_time(call) if call.reached else 0)
        usage.tokens_in = usage.tokens_in or self.budget.expected_in(wants.tokens_in)
        usage.tokens_out = max(_written(usage), min(wants.tokens_out, may_be))
        return usage

    @staticmethod
    def _in_the_time(call: Call) -> int:
        return int((time.monotonic() - (call.sent_at or call.began)) * TOKENS_A_SECOND)

    def close(self, call: Call) -> None:
        """Counts a request that has ended in whatever way, logs it and tells the supervisor."""
        self._under_way.pop(call.number, None)
        usage, estimated = self._counted(call)
        call.number = call.number or self.number()
        cost = self.budget.leave(call.number, usage, estimated)
        if call.refused is not None:
            self.budget.totals.refused += 1
        if self._is_logged(call):
            self._thread.submit(self._put, self._line(call, usage, estimated, cost), call.number, call.bodies)
        self.tell()

    def _counted(self, call: Call) -> tuple[Usage | None, bool]:
        """What the answer is counted as: what was told, and an estimate for what was not."""
        if call.wants is None or not call.generates:
            return None, False
        if call.unanswered:  # a provider takes money for what it read, whether or not it was heard
            return Usage(self.budget.expected_in(call.wants.tokens_in), 0), True
        if call.meter is None:
            cut_off = call.reached and not (call.status or call.fault or call.refused)  # this process is told to end
            return (self._so_far(call, call.wants), True) if cut_off else (None, False)
        usage, estimated = call.meter.end(call.whole), False
        if not usage.tokens_in:
            usage.tokens_in, estimated = self.budget.expected_in(call.wants.tokens_in), True
        if not usage.out_is_told:
            written = _written(usage)
            if call.left and not usage.ended:
                written = max(written, min(call.wants.tokens_out, self._in_the_time(call)))
            usage.tokens_out, estimated = written, True
        return usage, estimated

    def _is_logged(self, call: Call) -> bool:
        if call.refused == "token":
            self._unknown_lines += 1
            return self._unknown_lines <= MAX_UNKNOWN_LINES
        if call.refused is not None:
            self._refused_lines += 1
            return self._refused_lines <= MAX_REFUSED_LINES
        return True

    def _line(
        self, call: Call, usage: Usage | None, estimated: bool, cost: float | None, *, under_way: bool = False
    ) -> bytes:
        line = DriverCall(
            at=call.at,
            elapsed_s=round(self.elapsed_s(), 3),
            attempt=self._settings.attempt,
            number=call.number,
            dialect=call.dialect,
            path=self._clean(call.path),
            model=call.model,
            stream=call.stream,
            status=call.status,
            request_bytes=call.request_bytes,
            answer_bytes=call.answer_bytes,
            first_byte_s=None if call.first_byte_s is None else round(call.first_byte_s, 4),
            total_s=round(time.monotonic() - call.began, 4),
            tokens_in=usage.tokens_in if usage else None,
            tokens_out=usage.tokens_out if usage else None,
            tokens_cached=usage.tokens_cached if usage else None,
            cost_usd=cost,
            estimated=estimated,
            refused=call.refused,
            fault=call.fault,
            error=None if call.error is None else self._clean(call.error),
            tries=len(call.tries) + (call.first_byte_s is not None),
            under_way=under_way,
            left=call.left,
        )
        return json.dumps(line.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )

    def _put(self, line: bytes, number: int, bodies: tuple[bytes, bytearray] | None) -> None:
        """In the thread that writes, so that a file system that hangs stops no stream."""
        if not self._log.write(line):
            log.error("%s can't be written now; its lines are kept and tried again", self._settings.log)
        folder = self._settings.bodies
        if bodies is None or folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for kind, data in zip(("request", "answer"), bodies, strict=True):
                _write_private(
                    folder / f"{number:06d}.{kind}", bytes(data).replace(self._settings.token.encode(), b"***")
                )
        except OSError as error:
            log.error("a body can't be kept: %s", error.strerror)

    def end(self) -> None:
        """Writes what is left."""
        self._thread.submit(self._log.flush)
        self._thread.shutdown(wait=True)

    # -------------------------------------------------------------------------------------------------------------- telling

    def tell(self) -> None:
        """The totals, to the supervisor. One that doesn't read stops nothing: what can't be told now is told later."""
        totals = self.budget.totals
        self._untold = not say(
            {
                "tokens_in": totals.tokens_in,
                "tokens_out": totals.tokens_out,
                "tokens_cached": totals.tokens_cached,
                "cost_usd": round(totals.cost_usd, 6) if self._settings.prices is not None else None,
                "calls": totals.calls,
                "refused": totals.refused,
                "exhausted": self.budget.exhausted,
            }
        )

    def tell_again(self) -> None:
        """Tells what could not be told."""
        if self._untold:
            self.tell()

    # --------------------------------------------------------------------------------------------------------------- words

    def without_key(self, text: str, key: str | None) -> str:
        """A driver may quote what it was sent."""
        return text.replace(key, "***") if key else text

    def quoted(self, text: str) -> str:
        """What an error says: its message, or its beginning."""
        try:
            value = json.loads(text)
            error = value.get("error", value) if isinstance(value, dict) else value
            said: Any = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, RecursionError):
            said = text
        return self._clean(said if isinstance(said, str) else json.dumps(said))

    def _clean(self, text: str) -> str:
        plain = " ".join(text[: 8 * MAX_SAID_CHARS].replace(self._settings.token, "***").split())
        return printable(masked(plain))[:MAX_SAID_CHARS]


def _written(usage: Usage) -> int:
    return max(usage.tokens_out or 0, usage.tokens_of_words)


def say(value: dict[str, Any]) -> bool:
    """One line on standard output, whole or not at all; whether it was taken."""
    try:
        os.write(1, json.dumps(value).encode() + b"\n")
    except BlockingIOError:
        return False
    except OSError:
        return True  # nobody is there who could be told
    return True


def _write_private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)

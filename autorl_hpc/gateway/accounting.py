"""Count tokens and cost: `TokenBudget` (limits, which requests are let in) and `Books` (driver.jsonl, reports of totals)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from autorl_hpc.files.ledger import now_text
from autorl_hpc.files.redact import masked
from autorl_hpc.files.safe_open import DriverCall, LogWriter, add_up_calls, read_calls
from autorl_hpc.gateway.request import Prices, Refusal, RunLimits, Settings
from autorl_hpc.gateway.token_usage import DEFAULT_ANSWER_TOKENS, RequestedSize, TokenUsage, UsageMeter
from autorl_hpc.records.base import printable

# --- budgets of tokens and cost
# A request is let in if what is used, what requests in flight may still use, and its own input are within the limit. Inputs are
# estimates that an agent can falsify, so a request beside others counts with its maximum, and a request alone with its estimate:
# the limit is exceeded by at most one answer and the error of one input estimate. See docs/gateway.md.

WRITTEN_5M: Final = 1.25
WRITTEN_1H: Final = 2.0
"""Factors on the input price: Anthropic's for input written into a cache for five minutes or an hour."""

EXHAUSTED_SHARE: Final = 0.05
"""If less is left, a request that doesn't fit means that the budget is used up; otherwise, that it is too long."""

Exhausted = Literal["tokens", "cost"]


@dataclass
class TokenTotals:
    """Totals of the run over all attempts."""

    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_usd: float = 0.0
    calls: int = 0
    refused: int = 0

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass
class TokenBudget:
    """Totals, limits and requests in flight."""

    limits: RunLimits
    prices: Prices | None
    totals: TokenTotals
    exhausted: Exhausted | None = None
    _in_flight: dict[int, dict[Exhausted, float]] = field(default_factory=dict)  # the most that each may use

    def __post_init__(self) -> None:
        self._note_exhausted()

    def cost(self, usage: TokenUsage) -> float | None:
        """Return the dollars of one answer; None without prices."""
        prices = self.prices
        if prices is None:
            return None
        given, cached = usage.tokens_in or 0, usage.tokens_cached
        cached_price = prices.price_in if prices.price_cached is None else prices.price_cached
        written = (WRITTEN_5M - 1) * usage.written_5m + (WRITTEN_1H - 1) * usage.written_1h
        fresh = given - cached + written
        return (fresh * prices.price_in + cached * cached_price + (usage.tokens_out or 0) * prices.price_out) / 1e6

    def enter(
        self, number: int, estimated_in: int, asked_out: int, most_in: int | None = None, *, caches: bool = True
    ) -> None:
        """Let request `number` in, or raise a Refusal: the budget is used up, or others in flight may use what is left.
        `most_in`: upper limit of its input; None if the estimate is exact. `caches`: its input may be written into a cache
        for an hour, which costs more."""
        if self.exhausted:
            raise self._used_up(self.exhausted, "is used up")
        most = max(estimated_in, most_in or 0)
        price_in, price_out = (self.prices.price_in / 1e6, self.prices.price_out / 1e6) if self.prices else (0.0, 0.0)
        most_cost = most * price_in * (WRITTEN_1H if caches else 1.0)
        self._check_fits("tokens", estimated_in, most, estimated_in)
        self._check_fits("cost", estimated_in * price_in, most_cost, estimated_in)
        self._in_flight[number] = {"tokens": most + asked_out, "cost": most_cost + asked_out * price_out}

    def _limit(self, what: Exhausted) -> tuple[float | None, float]:
        if what == "tokens":
            return self.limits.tokens, self.totals.tokens
        return self.limits.cost_usd, self.totals.cost_usd

    def _check_fits(self, what: Exhausted, own: float, most: float, given: int) -> None:
        limit, used = self._limit(what)
        reserved = sum(each[what] for each in self._in_flight.values())
        if limit is None or used + reserved + most <= limit:
            return
        if used + own <= limit:
            if not self._in_flight:
                return
            message = f"what is left of the run's budget of {what} may be used by its requests that are under way: come again when they have ended"
            raise Refusal(429, "budget_reserved", message, retry_after_s=2)
        if limit - used <= EXHAUSTED_SHARE * limit:
            self.exhausted = what
            left = _amount(what, max(0.0, limit - used))
            raise self._used_up(what, f"has {left} left; this request's input alone takes about {_amount(what, own)}")
        tokens = int(limit - used if what == "tokens" else given * (limit - used) / own)
        # in the wording by which clients recognise that they must shorten the conversation and ask again
        message = (
            f"prompt is too long: {given} tokens > {tokens} maximum. The run's budget of {what} has about {tokens} tokens left, so that the "
            f"maximum is {tokens} tokens for this request (its input takes about {given}). Shorten the conversation, or submit what you have"
        )
        raise Refusal(400, "context_length_exceeded", message)

    def _used_up(self, what: Exhausted, says: str) -> Refusal:
        amount = _amount(what, self._limit(what)[0] or 0)
        message = f"the run's budget of {what} of {amount} {says}. Submit what you have; asking again doesn't help"
        return Refusal(403, "budget_exhausted", message)

    def leave(self, number: int, usage: TokenUsage | None) -> float | None:
        """End request `number` and return its cost in dollars. `usage` is None if it cost nothing."""
        self._in_flight.pop(number, None)
        if usage is None:
            return None
        cost = self.cost(usage)
        totals = self.totals
        totals.calls += 1
        totals.tokens_in += usage.tokens_in or 0
        totals.tokens_out += usage.tokens_out or 0
        totals.tokens_cached += usage.tokens_cached
        totals.cost_usd += cost or 0.0
        self._note_exhausted()
        return cost

    def _note_exhausted(self) -> None:
        kinds: tuple[Exhausted, ...] = ("cost", "tokens")
        for what in kinds:
            limit, used = self._limit(what)
            if limit is not None and used >= limit:
                self.exhausted = what


def _amount(what: Exhausted, value: float) -> str:
    return f"{value:,.0f} tokens" if what == "tokens" else f"{value:.4f} USD"


# --- the accounts of one run

log = logging.getLogger("autorl_hpc.gateway")

TOKENS_A_SECOND: Final = 100
"""Assumed speed of a driver, including hidden reasoning, if the client left before the end or the gateway is ended meanwhile."""

MAX_REFUSED_LINES: Final = 20_000
"""Limit per process, so that neither an agent nor another process on the node can fill the disk with refused requests."""

MAX_SAID_CHARS: Final = 300


@dataclass
class CallRecord:
    """A request's state, filled in on the way; the log's line is made from it at the end."""

    dialect: str
    path: str
    at: str = field(default_factory=now_text)
    began: float = field(default_factory=time.monotonic)
    quiet: bool = False  # not logged
    number: int = 0
    model: str | None = None
    generates: bool = False  # its tokens count
    stream: bool = False
    hides_usage: bool = False  # a chat stream for which the gateway asks for the usage
    wants: RequestedSize | None = None
    status: int = 0
    request_bytes: int = 0
    answer_bytes: int = 0
    sent_at: float | None = None
    first_byte_s: float | None = None
    tries: list[str] = field(default_factory=list)
    reached: bool = False  # it was sent to the driver, as far as is known
    meter: UsageMeter | None = None  # reads the answer, if there is one
    unanswered: bool = False  # it was sent to a provider, but nothing came back
    whole: bool = False  # the answer is complete
    left: bool = False  # the client did not wait for it
    refused: str | None = None
    fault: str | None = None
    error: str | None = None
    bodies: tuple[bytes, bytearray] | None = None  # request and answer, if they are stored

    @property
    def since_sent_s(self) -> float:
        return time.monotonic() - (self.sent_at or self.began)


class Books:
    """The accounts of one run. Create it before the event loop runs; call its methods only in the loop."""

    def __init__(self, settings: Settings) -> None:
        earlier = add_up_calls(read_calls(settings.log))
        used = settings.used  # reported by an earlier gateway; the log may lack lines
        totals = TokenTotals()
        for name in vars(totals):
            setattr(totals, name, max(getattr(earlier, name) or 0, getattr(used, name) or 0))
        self.budget = TokenBudget(settings.limits or RunLimits(), settings.prices, totals)
        self._settings = settings
        self._last = earlier.last_number
        self._log = LogWriter(settings.log)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "driver-log")
        self._refused_lines = 0
        self.set_elapsed(settings.elapsed_s)

    def number(self) -> int:
        self._last += 1
        return self._last

    def set_elapsed(self, elapsed_s: float) -> None:
        """Set how much of the budget's time is used, in seconds, as the supervisor reports it."""
        self._elapsed_from = time.monotonic() - elapsed_s

    def sending(self, call: CallRecord) -> None:
        """Write a line before request `call` is sent, so that it is counted even if the gateway dies."""
        if call.wants is not None and call.generates:
            usage = self._so_far(call, call.wants)
            line = self._line(call, usage, True, self.budget.cost(usage), under_way=True)
            self._thread.submit(self._write, line, call.number, None)

    def _so_far(self, call: CallRecord, wants: RequestedSize) -> TokenUsage:
        """Return how request `call` counts if it never ends: as output a typical answer's length or what the driver may have
        written in the time, at most what was asked for, and at least what came."""
        usage = TokenUsage() if call.meter is None else dataclasses.replace(call.meter.usage)
        may_be = max(DEFAULT_ANSWER_TOKENS, int(call.since_sent_s * TOKENS_A_SECOND) if call.reached else 0)
        usage.tokens_in = usage.tokens_in or wants.tokens_in
        usage.tokens_out = max(usage.written, min(wants.tokens_out, may_be))
        return usage

    def close(self, call: CallRecord) -> None:
        """Count a request that has ended in any way, log it and report to the supervisor."""
        usage, estimated = self._counted(call)
        call.number = call.number or self.number()
        cost = self.budget.leave(call.number, usage)
        if call.refused is not None:
            self.budget.totals.refused += 1
            self._refused_lines += 1
        if call.refused is None or self._refused_lines <= MAX_REFUSED_LINES:
            self._thread.submit(self._write, self._line(call, usage, estimated, cost), call.number, call.bodies)
        self.tell()

    def _counted(self, call: CallRecord) -> tuple[TokenUsage | None, bool]:
        if call.wants is None or not call.generates:
            return None, False
        if call.unanswered:  # providers charge for input even if no answer arrives
            return TokenUsage(call.wants.tokens_in, 0), True
        if call.meter is None:
            cut_off = call.reached and not (call.status or call.fault or call.refused)  # the gateway itself is ending
            return (self._so_far(call, call.wants), True) if cut_off else (None, False)
        usage = call.meter.end(call.whole)
        estimated = False
        if not usage.tokens_in:
            usage.tokens_in, estimated = call.wants.tokens_in, True
        if not usage.out_is_told:
            written = usage.written
            if call.left and not usage.ended:
                written = max(written, min(call.wants.tokens_out, int(call.since_sent_s * TOKENS_A_SECOND)))
            usage.tokens_out, estimated = written, True
        return usage, estimated

    def _line(
        self, call: CallRecord, usage: TokenUsage | None, estimated: bool, cost: float | None, under_way: bool = False
    ) -> bytes:
        same = {name: getattr(call, name) for name in DriverCall.model_fields.keys() & vars(call).keys()}
        counted = {name: getattr(usage, name, None) for name in ("tokens_in", "tokens_out", "tokens_cached")}
        changed = {
            "elapsed_s": round(time.monotonic() - self._elapsed_from, 3),
            "attempt": self._settings.attempt,
            "path": self._clean(call.path),
            "first_byte_s": None if call.first_byte_s is None else round(call.first_byte_s, 4),
            "total_s": round(time.monotonic() - call.began, 4),
            "cost_usd": cost,
            "estimated": estimated,
            "error": None if call.error is None else self._clean(call.error),
            "tries": len(call.tries) + (call.first_byte_s is not None),
            "under_way": under_way,
        }
        line = DriverCall(**{**same, **counted, **changed}).model_dump(mode="json")
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    def _write(self, line: bytes, number: int, bodies: tuple[bytes, bytearray] | None) -> None:
        """Write a line and bodies, in the writing thread, so that a hanging file system stops no stream."""
        if not self._log.write(line):
            log.error("%s can't be written now; its lines are kept and tried again", self._settings.log)
        folder = self._settings.bodies
        if bodies is None or folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for kind, data in zip(("request", "answer"), bodies, strict=True):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                with os.fdopen(os.open(folder / f"{number:06d}.{kind}", flags, 0o600), "wb") as file:
                    file.write(bytes(data).replace(self._settings.token.encode(), b"***"))
        except OSError as error:
            log.error("a body can't be kept: %s", error.strerror)

    def end(self) -> None:
        self._thread.submit(self._log.flush)
        self._thread.shutdown(wait=True)

    def tell(self) -> None:
        """Send the totals to the supervisor. If it doesn't read, the next request's totals hold them too."""
        told = dataclasses.asdict(self.budget.totals)
        told["cost_usd"] = round(told["cost_usd"], 6) if self._settings.prices is not None else None
        say({**told, "exhausted": self.budget.exhausted})

    def _clean(self, text: str) -> str:
        plain = " ".join(text[: 8 * MAX_SAID_CHARS].replace(self._settings.token, "***").split())
        return printable(masked(plain))[:MAX_SAID_CHARS]


def say(value: dict[str, Any]) -> None:
    """Write one line to standard output, whole or, if the supervisor does not read or is gone, not at all."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(value).encode() + b"\n")

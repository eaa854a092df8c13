"""The budgets of tokens and cost, and who may still ask.

The rule: a request is let in while what is used, what requests in flight may still use, and its own input are within the limit. Its own
answer is not counted beforehand, for most answers are far shorter than what is asked for. Inputs are estimates, and whoever writes them
can make them wrong: so of requests at once the most counts that they can be, and one that is alone is let in by its estimate. One
request at a time can thus use the budget to its end, and the limit is passed by at most one answer (as long as that request asked
for) and by what the estimate of one input is wrong by. Of two at once the second one waits near the end: it is told to come again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from autorl_hpc.gateway.refusals import Refusal
from autorl_hpc.gateway.settings import Prices, RunLimits
from autorl_hpc.gateway.usage import Usage

WRITTEN_5M: Final = 1.25
WRITTEN_1H: Final = 2.0
"""Times the price of input: what Anthropic takes for input that goes into a cache, for five minutes or an hour."""

LEARN: Final = 0.3
"""Share of the newest answer in what is learned about estimates."""

BOUNDS: Final = (0.2, 5.0)
EXHAUSTED_SHARE: Final = 0.05
"""With less than this left, a request that doesn't fit means that the budget is used up; before, only that the request is too long."""

COME_AGAIN_S: Final = 2

Exhausted = Literal["tokens", "cost"]


@dataclass
class Totals:
    """Of the run, all attempts together."""

    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_usd: float = 0.0
    calls: int = 0
    refused: int = 0

    @property
    def tokens(self) -> int:
        """Of both kinds."""
        return self.tokens_in + self.tokens_out


@dataclass
class Place:
    """What one request in flight may use at most, beside the estimate of its input."""

    estimated_in: int
    tokens: float
    cost: float


@dataclass
class Budget:
    """Totals, limits and requests in flight."""

    limits: RunLimits
    prices: Prices | None
    totals: Totals
    exhausted: Exhausted | None = None
    _places: dict[int, Place] = field(default_factory=dict)
    _scale: float = 1.0
    _price_scale: float = 1.0

    def __post_init__(self) -> None:
        self._look()

    def cost(self, usage: Usage) -> float | None:
        """Dollars of one answer; None without prices."""
        prices = self.prices
        if prices is None:
            return None
        given, cached = usage.tokens_in or 0, usage.tokens_cached
        cached_price = prices.price_in if prices.price_cached is None else prices.price_cached
        written = (WRITTEN_5M - 1) * usage.written_5m + (WRITTEN_1H - 1) * usage.written_1h
        fresh = given - cached + written
        return (fresh * prices.price_in + cached * cached_price + (usage.tokens_out or 0) * prices.price_out) / 1e6

    def expected_in(self, estimated_in: int) -> int:
        """What an estimate by length most likely stands for, by what the driver told so far."""
        return max(1, round(estimated_in * self._scale))

    def enter(
        self, number: int, estimated_in: int, asked_out: int, most_in: int | None = None, *, caches: bool = True
    ) -> None:
        """Lets request `number` in.

        Args:
            most_in: what its input can't be more than; None: the estimate is right.
            caches: its input may be written into a cache for an hour, which costs more.

        Raises:
            Refusal: the budget is used up, or others in flight may use what is left.
        """
        if self.exhausted:
            raise self._over(self.exhausted, "is used up")
        prices = self.prices
        given = estimated_in * self._scale
        most = given if most_in is None else max(given, most_in)
        price_in, price_out = (prices.price_in / 1e6, prices.price_out / 1e6) if prices else (0.0, 0.0)
        dearest = price_in * (WRITTEN_1H if caches else 1.0)
        others = self._places.values()
        tokens, cost = sum(p.tokens for p in others), sum(p.cost for p in others)
        self._fits("tokens", self.limits.tokens, self.totals.tokens, tokens, given, most, given)
        own_cost = given * price_in * self._price_scale
        own_most = max(own_cost, most * dearest)
        self._fits("cost", self.limits.cost_usd, self.totals.cost_usd, cost, own_cost, own_most, given)
        self._places[number] = Place(estimated_in, most + asked_out, own_most + asked_out * price_out)

    def _fits(
        self, what: Exhausted, limit: float | None, used: float, reserved: float, own: float, most: float, given: float
    ) -> None:
        if limit is None or used + reserved + most <= limit:
            return
        if used + own <= limit:
            if not self._places:
                return
            raise Refusal(
                429,
                "budget_reserved",
                f"what is left of the run's {_name(what)} may be used by its requests that are under way: come again when they have ended",
                retry_after_s=COME_AGAIN_S,
            )
        if limit - used <= EXHAUSTED_SHARE * limit:
            self.exhausted = what
            raise self._over(
                what,
                f"has {_shown(what, max(0.0, limit - used))} left; this request's input alone takes about {_shown(what, own)}",
            )
        left, asked = int(limit - used), int(own)
        if what == "cost":
            left, asked = int(given * (limit - used) / own), int(given)
        raise too_long(what, asked, left)

    def _over(self, what: Exhausted, says: str) -> Refusal:
        limit = self.limits.tokens if what == "tokens" else self.limits.cost_usd
        return Refusal(
            403,
            "budget_exhausted",
            f"the run's {_name(what)} of {_shown(what, limit or 0)} {says}. Submit what you have; asking again doesn't help",
        )

    def leave(self, number: int, usage: Usage | None, estimated: bool) -> float | None:
        """Request `number` has ended; its cost. `usage` None: it cost nothing."""
        place = self._places.pop(number, None)
        if usage is None:
            return None
        cost = self.cost(usage)
        totals = self.totals
        totals.calls += 1
        totals.tokens_in += usage.tokens_in or 0
        totals.tokens_out += usage.tokens_out or 0
        totals.tokens_cached += usage.tokens_cached
        totals.cost_usd += cost or 0.0
        if place is not None and not estimated and usage.tokens_in:
            self._learn(place, usage, cost)
        self._look()
        return cost

    def _learn(self, place: Place, usage: Usage, cost: float | None) -> None:
        given = usage.tokens_in or 1
        low, high = BOUNDS
        ratio = min(max(given / place.estimated_in, low), high)
        self._scale += LEARN * (ratio - self._scale)
        if cost is not None and self.prices is not None and self.prices.price_in > 0:
            of_input = cost - (usage.tokens_out or 0) * self.prices.price_out / 1e6
            of_price = of_input / (given * self.prices.price_in / 1e6)
            self._price_scale += LEARN * (min(max(of_price, 0.01), WRITTEN_1H) - self._price_scale)

    def _look(self) -> None:
        if self.limits.tokens is not None and self.totals.tokens >= self.limits.tokens:
            self.exhausted = "tokens"
        elif self.limits.cost_usd is not None and self.totals.cost_usd >= self.limits.cost_usd:
            self.exhausted = "cost"


def too_long(what: Exhausted, asked: int, left: int) -> Refusal:
    """In the words by which clients know that the conversation must become shorter: many fold it and ask again."""
    return Refusal(
        400,
        "context_length_exceeded",
        f"prompt is too long: {asked} tokens > {left} maximum. The run's {_name(what)} has about {left} tokens left, so that the maximum "
        f"is {left} tokens for this request (its input takes about {asked}). Shorten the conversation, or submit what you have",
    )


def _name(what: Exhausted) -> str:
    return "budget of tokens" if what == "tokens" else "budget of cost"


def _shown(what: Exhausted, value: float) -> str:
    return f"{value:,.0f} tokens" if what == "tokens" else f"{value:.4f} USD"

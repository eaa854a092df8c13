"""The rule by which requests are let in to a budget of tokens and cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from draws import OFTEN
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.accounting import Books, TokenBudget, TokenTotals
from autorl_hpc.gateway.request import Prices, Refusal, RunLimits, Settings, Upstream
from autorl_hpc.gateway.token_usage import TokenUsage
from autorl_hpc.records.entries import DriverUse


def used(given_tokens: int, out: int) -> TokenUsage:
    return TokenUsage(tokens_in=given_tokens, tokens_out=out, out_is_last=True, ended=True)


def of_tokens(**totals: int) -> TokenBudget:
    return TokenBudget(RunLimits(tokens=1000), None, TokenTotals(**totals))


def refused(budget: TokenBudget, *request: int, caches: bool = True) -> Refusal:
    with pytest.raises(Refusal) as caught:
        budget.enter(*request, caches=caches)
    return caught.value


def test_one_request_at_a_time_uses_the_budget_to_its_end() -> None:
    budget, number = of_tokens(), 0
    while budget.exhausted is None:
        number += 1
        budget.enter(number, 50, 100_000)
        budget.leave(number, used(50, 100))
    assert 950 <= budget.totals.tokens <= 1000 + 100
    refusal = refused(budget, 99, 1, 1)
    assert (refusal.status, refusal.code) == (403, "budget_exhausted")


def test_input_and_output_are_counted_and_a_failed_request_gives_its_place_back() -> None:
    budget = of_tokens()
    budget.enter(1, 50, 5000)
    assert budget.leave(1, None) is None
    for number, usage in ((2, used(60, 30)), (3, used(40, 10))):
        budget.enter(number, 50, 5000)
        budget.leave(number, usage)
    totals = budget.totals
    assert (totals.tokens_in, totals.tokens_out, totals.tokens, totals.calls) == (100, 40, 140, 2)


def test_what_the_log_could_not_take_is_used_all_the_same(tmp_path: Path) -> None:
    """An earlier gateway told the supervisor, and its lines were lost with a full disk."""
    settings = Settings(
        token="0123456789abcdef", upstream=Upstream(url="http://h/v1"), model="m", log=tmp_path / "driver.jsonl",
        limits=RunLimits(tokens=1000), used=DriverUse(tokens_in=700, tokens_out=300, calls=5),
    )  # fmt: skip
    books = Books(settings)
    books.end()
    assert books.budget.totals.tokens == 1000 and books.budget.exhausted == "tokens"


def test_the_second_of_two_waits_where_the_first_may_use_what_is_left() -> None:
    budget = of_tokens()
    budget.enter(1, 50, 2000)
    refusal = refused(budget, 2, 50, 10)
    assert (refusal.status, refusal.code) == (429, "budget_reserved") and refusal.retry_after_s
    budget.leave(1, used(50, 20))
    budget.enter(2, 50, 10)


@pytest.mark.parametrize("limits", [RunLimits(tokens=10_000), RunLimits(cost_usd=0.01)])
def test_a_guessed_input_is_let_in_alone_and_counts_as_the_most_it_can_be(limits: RunLimits) -> None:
    budget = TokenBudget(limits, Prices(price_in=1.0, price_out=1.0), TokenTotals())
    budget.enter(1, 1500, 10, 9000, caches=False)
    assert refused(budget, 2, 1500, 10, 9000, caches=False).code == "budget_reserved"
    budget.enter(3, 10, 10, 40, caches=False)
    budget.leave(1, used(9000, 10))
    budget.leave(3, used(40, 10))


def test_a_burst_of_inputs_that_are_written_into_a_cache_is_held_within_the_cost() -> None:
    budget = TokenBudget(RunLimits(cost_usd=1.0), Prices(price_in=10.0, price_out=0.0, price_cached=0.1), TokenTotals())
    under_way = []
    for number in range(20, 60):
        try:
            budget.enter(number, 2500, 1, 10_000)
            under_way.append(number)
        except Refusal:
            pass
    for number in under_way:
        budget.leave(number, TokenUsage(10_000, 1, 0, written_1h=10_000, out_is_last=True, ended=True))
    assert under_way and budget.totals.cost_usd <= 1.0 + 0.2


def test_a_request_that_is_too_long_for_what_is_left_doesnt_end_the_run() -> None:
    budget = of_tokens(tokens_in=500)
    refusal = refused(budget, 1, 600, 10)
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded") and budget.exhausted is None
    assert "prompt is too long: 600 tokens > 500 maximum" in refusal.message
    budget.enter(2, 100, 10)
    costly = TokenBudget(RunLimits(cost_usd=0.01), Prices(price_in=1.0, price_out=1.0), TokenTotals(cost_usd=0.005))
    assert "about 5000 tokens left" in refused(costly, 1, 6000, 10).message


@pytest.mark.parametrize("others", [0, 1])
def test_the_last_rest_that_nothing_fits_into_counts_as_used_up(others: int) -> None:
    budget = of_tokens(tokens_in=960)
    for number in range(others):
        budget.enter(number, 10, 5)
    assert refused(budget, 2, 60, 10).code == "budget_exhausted" and budget.exhausted == "tokens"


def test_cost_is_a_budget_of_its_own() -> None:
    budget = TokenBudget(RunLimits(cost_usd=0.01), Prices(price_in=1.0, price_out=10.0), TokenTotals())
    budget.enter(1, 1000, 100)
    assert budget.leave(1, used(1000, 100)) == pytest.approx(0.002)
    budget.enter(2, 1000, 1000)
    budget.leave(2, used(1000, 1000))
    assert budget.exhausted == "cost"
    again = TokenBudget(RunLimits(cost_usd=0.01), Prices(price_in=1, price_out=1), TokenTotals(cost_usd=0.01))
    assert again.exhausted == "cost"


@OFTEN
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 400), st.floats(0, 1), st.booleans()), min_size=1, max_size=60
    )
)
def test_the_limit_is_passed_by_at_most_one_answer(requests: list[tuple[int, int, float, bool]]) -> None:
    """With inputs that are estimated right, in whatever order requests come and end."""
    budget, longest = of_tokens(), 0
    under_way: list[tuple[int, TokenUsage]] = []
    for number, (given_tokens, asked_out, share, ends) in enumerate(requests, 1):
        try:
            budget.enter(number, given_tokens, asked_out)
            under_way.append((number, used(given_tokens, int(asked_out * share))))
            longest = max(longest, asked_out)
        except Refusal:
            pass
        if ends and under_way:
            budget.leave(*under_way.pop(0))
    for number, usage in under_way:
        budget.leave(number, usage)
    assert budget.totals.tokens <= 1000 + longest

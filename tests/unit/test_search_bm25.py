"""BM25 against a plain computation; snippets."""

from __future__ import annotations

import math

import corpora
import numpy as np
import pytest

from autorl_hpc.rollouts.search.backends import K1, B, TermIndex, snippet, terms

no_connections = corpora.no_connections


def brute_force(texts: list[list[str]], query: list[str]) -> list[float]:
    """The score of each text by BM25's formula."""
    average = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for term in query:
        holding = sum(term in other for other in texts)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for number, words in enumerate(texts):
            times = words.count(term)
            scores[number] += idf * times / (times + K1 * (1 - B + B * len(words) / average))
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_bm25_ranks_as_the_formula_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    vocabulary = [f"w{n}" for n in range(30)]
    texts = [[str(word) for word in draw.choice(vocabulary, size=draw.integers(1, 40))] for _ in range(60)]
    index = TermIndex(texts)
    for _ in range(20):
        query = [str(word) for word in draw.choice([*vocabulary, "unknown"], size=draw.integers(1, 6))]
        scores = brute_force(texts, query)
        found = index.best(query, 10)
        best = [score for score in sorted(scores, reverse=True)[:10] if score]
        # Equal scores may differ in the last bit by the order of addition, so numbers may be exchanged.
        assert [scores[number] for number in found] == pytest.approx(best)


def test_equal_scores_stand_in_the_corpus_order_and_what_holds_no_term_is_not_found() -> None:
    assert terms("The ÉCOLE of \uff32\uff24 2,023 Straße, don't") == ["école", "rd", "2", "023", "strasse", "don", "t"]
    index = TermIndex(terms(text) for text in ["red apple", "blue", "red apple", "apple red"])
    assert index.best(["apple"], 3) == [0, 2, 3] and index.best(["apple"], 2) == [0, 2]
    assert index.best(["green"], 3) == index.best(terms("the of"), 3) == index.best([], 3) == []
    assert TermIndex([]).best(["x"], 3) == TermIndex([[], []]).best(["x"], 3) == []


LONG = " ".join(f"word{n}" for n in range(300))


@pytest.mark.parametrize("query", ["word150", "word0", "word299", "nothing", "word10 word12 word200", ""])
@pytest.mark.parametrize("chars", [40, 100, 300])
def test_a_snippet_shows_where_the_words_are(query: str, chars: int) -> None:
    part = snippet(LONG, query, chars)
    assert len(part) <= chars and part in LONG and len(part) > chars // 2
    assert all(word in LONG.split() for word in part.split()), "a word was cut"
    if query.startswith("word"):
        assert query.split(maxsplit=1)[0] in part.split()

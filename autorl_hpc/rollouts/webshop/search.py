"""The search engine: BM25 as Lucene and Anserini compute it with WebShop's settings, on an inverted index in memory.

What is known of the original (pyserini 0.17, default analyzer and similarity) is followed: Lucene's 33 stop words, English
possessives, Porter stems, k1 = 0.9 and b = 0.4, lengths rounded to Lucene's one byte, ties in order of product numbers. The
ranking was not compared with a running Lucene. Its tokenizer is approximated by a regular expression, and the stemmer is
Snowball's `porter`, which leaves out two departures of Lucene's from the published algorithm (`bli`, `logi`).
"""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

K1, B = 0.9, 0.4
RESULTS = 50
"""Products that a search returns at most."""
_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_APOSTROPHES = "'\u2019\u2018"
_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(rf"\w+(?:(?:(?<={_LETTER})[{_APOSTROPHES}.:·](?={_LETTER})|(?<=\d)[{_APOSTROPHES}.,;](?=\d))\w+)*")
"""Unicode's word boundaries (UAX 29) for Latin text: "levi's", "u.s" and "1,000.5" are one token each."""
MAX_TOKEN_CHARS = 255
FREE_LENGTHS = 24
"""Lengths up to here are kept exactly in Lucene's byte."""
CACHED_QUERIES = 4096


def tokens(text: str) -> list[str]:
    """The terms of a text, in order."""
    words = (_without_possessive(word).lower() for word in _TOKEN.findall(text))
    return [_stem(word) for word in words if word not in STOP_WORDS and len(word) <= MAX_TOKEN_CHARS]


class Index:
    """BM25 over documents by id; impacts are computed once, so that a search only adds them up."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        """Indexes `documents`."""
        # By id: equal scores are then told apart as the original does it.
        self._ids = sorted(documents)
        counts = [Counter(tokens(documents[identity])) for identity in self._ids]
        lengths = [sum(count.values()) for count in counts]
        average = sum(lengths) / len(lengths) if lengths else 1.0
        frequency = Counter(term for count in counts for term in count)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, count in enumerate(counts):
            norm = K1 * (1 - B + B * rounded_length(lengths[number]) / average)
            for term, times in count.items():
                idf = math.log(1 + (len(counts) - frequency[term] + 0.5) / (frequency[term] + 0.5))
                self._postings[term].append((number, idf * times / (times + norm)))
        self._cached = functools.lru_cache(maxsize=CACHED_QUERIES)(self._search)

    def search(self, query: str) -> tuple[str, ...]:
        """Ids of the best documents, best first; none where no term is known."""
        return self._cached(query)

    def _search(self, query: str) -> tuple[str, ...]:
        scores: dict[int, float] = {}
        get = scores.get
        for term, times in Counter(tokens(query)).items():
            for number, impact in self._postings.get(term, ()):
                scores[number] = get(number, 0.0) + times * impact
        best = heapq.nsmallest(RESULTS, ((-score, number) for number, score in scores.items()))
        return tuple(self._ids[number] for _, number in best)


def rounded_length(terms: int) -> int:
    """A document's length as Lucene keeps it: SmallFloat.byte4ToInt(intToByte4(n)), four significant bits above 24."""
    if terms < FREE_LENGTHS:
        return terms
    above = terms - FREE_LENGTHS
    shift = max(0, above.bit_length() - 4)
    return FREE_LENGTHS + (above >> shift << shift)


def _without_possessive(word: str) -> str:
    return word[:-2] if len(word) > 2 and word[-2] in _APOSTROPHES and word[-1] in "sS" else word


@functools.lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    stemmed: str = _stemmer().stemWord(word)
    return stemmed


@functools.cache
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("porter")

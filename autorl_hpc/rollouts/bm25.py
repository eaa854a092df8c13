"""BM25 ranking with an inverted index in memory, for some hundred thousand short texts: about 1 kB for 100 words.

Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009, with Lucene's idf, which is never negative.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

K1, B = 0.9, 0.4
"""Anserini's defaults for passages, and WebShop's settings."""


class TermIndex:
    """The texts that hold a term, with the term's weight in each.

    Args:
        texts: the terms of each text.
        length: the length that counts for a text of so many terms.
    """

    def __init__(self, texts: Iterable[Iterable[str]], length: Callable[[int], int] = int) -> None:
        counts = [Counter(text) for text in texts]
        lengths = [count.total() for count in counts]
        average = (sum(lengths) / len(lengths) if lengths else 0.0) or 1.0
        frequency = Counter(term for count in counts for term in count)
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        for number, count in enumerate(counts):
            norm = K1 * (1 - B + B * length(lengths[number]) / average)
            for term, times in count.items():
                idf = math.log(1 + (len(counts) - frequency[term] + 0.5) / (frequency[term] + 0.5))
                numbers, weights = self._postings.setdefault(term, (array("I"), array("d")))
                numbers.append(number)
                weights.append(idf * times / (times + norm))

    def best(self, query: Iterable[str], k: int) -> list[int]:
        """Return the numbers of the `k` best texts that hold a term of the query; equal ones in the texts' order."""
        scores: dict[int, float] = {}
        for term, times in Counter(query).items():
            for number, weight in zip(*self._postings.get(term, ((), ())), strict=True):
                scores[number] = scores.get(number, 0.0) + times * weight
        best = heapq.nsmallest(k, ((-score, number) for number, score in scores.items()))
        return [number for _, number in best]

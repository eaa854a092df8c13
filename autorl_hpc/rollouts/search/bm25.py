"""An offline corpus and BM25 over it: an inverted index in memory, in each process that searches.

A corpus is a file of JSON lines, or a folder of such files (`*.jsonl`, in order of their names): objects with `title` and
`text`, and `url` where there is one. Its hash is the sha256 of the bytes, one file after the other, so that `sha256sum` gives
that of a single file. Made for up to some hundred thousand short documents: about 1 kB of memory for each 100 words.

Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009, with Lucene's idf, which is never negative.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.rollouts.search.backend import Result, Setup

VERSION = "1"
"""Any change that can change one result is a new version."""
K1, B = 0.9, 0.4
"""Anserini's defaults for passages."""
SNIPPET_CHARS = 300
"""Of a result: three of them fit beside the rest of an episode into a context of 4,096 tokens."""
CORPUS = "corpus.jsonl"
_STOP_WORDS = """a an and are as at be but by for from had has have he her his how in into is it its no not of on or she that
the their then there these they this to was were what when where which who whom whose will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Words of questions among them: a query is often the question itself."""
_WORD = re.compile(r"\w+")


class Document(NamedTuple):
    """One text of a corpus."""

    title: str
    url: str
    text: str


class Corpus(NamedTuple):
    """Documents in their order, and the hash of the bytes that they were read from."""

    documents: tuple[Document, ...]
    sha256: str


def terms(text: str) -> list[str]:
    """The words that are looked up, in order: case and width of letters make no difference; no stemming."""
    return [word for word in _WORD.findall(_folded(text)) if word not in STOP_WORDS]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def read_corpus(path: Path) -> Corpus:
    """The corpus in a file or folder.

    Raises:
        OSError: it can't be read.
        ValueError: a line is no document, or there is none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    documents: list[Document] = []
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                if line.strip():
                    documents.append(_document(line, f"{file.name}, line {number}", len(documents)))
    if not documents:
        raise ValueError(f"there are no documents in {path.name}")
    return Corpus(tuple(documents), digest.hexdigest())


def _document(line: bytes, where: str, number: int) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: no JSON") from None
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("title", "text")):
        raise ValueError(f"{where}: a document is an object with the texts `title` and `text`")
    return Document(value["title"], str(value.get("url") or f"doc:{number}"), value["text"])


class Index:
    """Which documents hold a term, and what it is worth in each."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(terms(text)) for text in texts]
        lengths = [sum(count.values()) for count in counts]
        average = (sum(lengths) / len(lengths) if lengths else 0.0) or 1.0
        frequency = Counter(term for count in counts for term in count)
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        for number, count in enumerate(counts):
            norm = K1 * (1 - B + B * lengths[number] / average)
            for term, times in count.items():
                idf = math.log(1 + (len(counts) - frequency[term] + 0.5) / (frequency[term] + 0.5))
                numbers, worths = self._postings.setdefault(term, (array("I"), array("d")))
                numbers.append(number)
                worths.append(idf * times * (K1 + 1) / (times + norm))

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        """Numbers and scores of the `k` best texts; equal scores in the texts' order, and none that holds no term."""
        scores: dict[int, float] = {}
        for term, times in Counter(terms(query)).items():
            numbers, worths = self._postings.get(term, ((), ()))
            for number, worth in zip(numbers, worths, strict=True):
                scores[number] = scores.get(number, 0.0) + times * worth
        best = heapq.nsmallest(k, ((-score, number) for number, score in scores.items()))
        return [(number, -score) for score, number in best]


class Bm25:
    """A corpus that can be searched. It never changes, so all environments of a process share one."""

    def __init__(self, corpus: Corpus, snippet_chars: int = SNIPPET_CHARS) -> None:
        self.corpus = corpus
        self.snippet_chars = snippet_chars
        self._index = Index([f"{document.title}\n{document.text}" for document in corpus.documents])

    @property
    def identity(self) -> str:
        """See the Protocol."""
        return f"bm25/{VERSION} corpus {self.corpus.sha256} snippet {self.snippet_chars}"

    def search(self, query: str, k: int) -> list[Result]:
        """See the Protocol. It can't fail."""
        found = (self.corpus.documents[number] for number, _ in self._index.best(query, k))
        return [Result(each.title, each.url, snippet(each.text, query, self.snippet_chars)) for each in found]


def snippet(text: str, query: str, chars: int) -> str:
    """The part of a text, at most `chars` long, that holds the most different words of the query; the first of equal ones."""
    text = " ".join(text.split())
    if len(text) <= chars:
        return text
    wanted = set(terms(query))
    # Folding may change a text's length: words are looked at one by one, where they stand.
    hits = [
        (match.start(), match.end(), word) for match in _WORD.finditer(text) if (word := _folded(match[0])) in wanted
    ]
    start = max(0, _best_start(hits, chars) - chars // 4)
    start = min(start, len(text) - chars)
    part = text[start : start + chars]
    if start > 0:
        part = part.partition(" ")[2] or part
    if start + chars < len(text):
        part = part.rpartition(" ")[0] or part
    return part


def _best_start(hits: Sequence[tuple[int, int, str]], chars: int) -> int:
    """Where the window begins that holds the most different words; each window begins at a hit."""
    inside: Counter[str] = Counter()
    best, where, end = 0, 0, 0
    for first, (start, _, word) in enumerate(hits):
        while end < len(hits) and hits[end][1] <= start + chars * 3 // 4:
            inside[hits[end][2]] += 1
            end += 1
        if len(inside) > best:
            best, where = len(inside), start
        if end > first:
            inside[word] -= 1
            if inside[word] <= 0:
                del inside[word]
        else:
            end = first + 1
    return where


def from_setup(setup: Setup) -> Bm25:
    """The corpus that the options name: `corpus` (a file or folder below the data, default corpus.jsonl), `corpus_sha256`,
    `snippet_chars`. Graders refuse another corpus than the recipe's; an agent's may be a part of it.

    Raises:
        OSError, ValueError: see `read_corpus`; a path that leads out of the data, another corpus than the recipe's.
    """
    options: Mapping[str, Any] = setup.options
    root = Path(setup.data).resolve()
    path = (root / str(options.get("corpus", CORPUS))).resolve()
    if not path.is_relative_to(root):
        raise ValueError("option `corpus` leads out of the task's data")
    found = _opened(path, int(options.get("snippet_chars", SNIPPET_CHARS)))
    wanted = options.get("corpus_sha256")
    if setup.held_out and wanted is None:
        raise ValueError("option `corpus_sha256` is missing: a score belongs to one corpus")
    if setup.held_out and wanted != found.corpus.sha256:
        raise ValueError(f"the corpus {path.name} has sha256 {found.corpus.sha256}, the recipe names {wanted}")
    return found


@functools.lru_cache(maxsize=4)
def _opened(path: Path, snippet_chars: int) -> Bm25:
    return Bm25(read_corpus(path), snippet_chars)


def write_corpus(path: Path, documents: Iterator[Document] | Sequence[Document]) -> None:
    """JSON lines in ASCII with sorted keys, so that the same documents give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document._asdict(), sort_keys=True) + "\n" for document in documents)
    path.write_text("".join(lines), encoding="ascii", newline="\n")

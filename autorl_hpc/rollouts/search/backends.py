"""Search back ends, chosen by the option `search`: BM25 over a corpus, `online`, `replay`. A task adds its own by
`BACKENDS["name"] = make` in its environment.py. Only `online` opens connections."""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import math
import os
import re
import secrets
import stat
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autorl_hpc.rollouts.environment import Unavailable


class Result(NamedTuple):
    """One search result."""

    title: str
    url: str
    snippet: str


class SearchBackend(Protocol):
    """Finds texts for a query. `identity` is kind, version, corpus or address, and never a key: results are recorded under it."""

    @property
    def identity(self) -> str: ...

    def search(self, query: str, k: int) -> list[Result]:
        """Return at most `k` results, best first. Raises SearchFailed if the request failed; never an empty list instead."""


class SearchFailed(Unavailable):
    """The search request failed: the grader's fault, and no score. The message holds no key."""


class Setup(NamedTuple):
    """The arguments of a back end: the recipe's options, and the folder of the training data or the vault (`held_out`)."""

    options: Mapping[str, Any]
    data: Path
    held_out: bool = False


def make_backend(setup: Setup) -> SearchBackend:
    """Create the back end that the option `search` names (default bm25). Raises ValueError if there is none, or one of its options
    is missing or wrong, and OSError if its corpus or key can't be read."""
    name = str(setup.options.get("search", "bm25"))
    if name not in BACKENDS:
        raise ValueError(f"there is no search back end `{name}`; there are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](setup)


# --- BM25: the index, also of WebShop's search

K1, B = 0.9, 0.4  # Anserini's defaults for passages, and WebShop's settings


class TermIndex:
    """BM25 ranking with an inverted index in memory, about 1 kB for 100 words (Robertson and Zaragoza, "The Probabilistic
    Relevance Framework", 2009, with Lucene's idf). `length`: the length that counts for a text of so many terms."""

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


# --- BM25 over an offline corpus
# A corpus is a JSON lines file, or a folder of them (`*.jsonl`, in order of names), with `title`, `text` and optionally `url`.
# Its hash is the sha256 of the concatenated bytes, so for a single file it equals `sha256sum`.

BM25_VERSION = "1"  # Any change that can change a result needs a new version
SNIPPET_CHARS = 300
"""Length of a result's text: three of them fit into a context of 4,096 tokens beside the rest of an episode."""
CORPUS = "corpus.jsonl"
_STOP_WORDS = """a an and are as at be but by for from had has have he her his how in into is it its no not of on or she that
the their then there these they this to was were what when where which who whom whose will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())  # Includes question words, because a query is often the question itself
_WORD = re.compile(r"\w+")


class Document(NamedTuple):
    """One text of a corpus."""

    title: str
    url: str
    text: str


class Corpus(NamedTuple):
    """Documents in order, and the hash of the bytes that they were read from."""

    documents: tuple[Document, ...]
    sha256: str


def terms(text: str) -> list[str]:
    """Return the indexed words in order. Letter case and width are ignored; no stemming."""
    return [word for word in _WORD.findall(_folded(text)) if word not in STOP_WORDS]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def read_corpus(path: Path) -> Corpus:
    """Read the corpus in a file or folder. Raises ValueError if a line is not a document, or there is none."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    documents: list[Document] = []
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                    title, text = value["title"], value["text"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    title = text = None
                if not isinstance(title, str) or not isinstance(text, str):
                    raise ValueError(
                        f"{file.name}, line {number}: a document is a JSON object with the texts `title` and `text`"
                    )
                documents.append(Document(title, str(value.get("url") or f"doc:{len(documents)}"), text))
    if not documents:
        raise ValueError(f"there are no documents in {path.name}")
    return Corpus(tuple(documents), digest.hexdigest())


class Bm25:
    """A searchable corpus. Immutable, so all environments of a process share one."""

    def __init__(self, corpus: Corpus, snippet_chars: int = SNIPPET_CHARS) -> None:
        self.corpus = corpus
        self.snippet_chars = snippet_chars
        self._index = TermIndex(terms(f"{document.title}\n{document.text}") for document in corpus.documents)

    @property
    def identity(self) -> str:
        return f"bm25/{BM25_VERSION} corpus {self.corpus.sha256} snippet {self.snippet_chars}"

    def search(self, query: str, k: int) -> list[Result]:
        """See the Protocol. Never fails."""
        found = (self.corpus.documents[number] for number in self._index.best(terms(query), k))
        return [Result(each.title, each.url, snippet(each.text, query, self.snippet_chars)) for each in found]


def snippet(text: str, query: str, chars: int) -> str:
    """Return the part of a text, at most `chars` long, with the most different words of the query; the first such part."""
    text = " ".join(text.split())
    if len(text) <= chars:
        return text
    wanted = set(terms(query))
    # Folding may change a text's length, so words are folded one by one to keep their positions.
    found = [(match.start(), match.end(), _folded(match[0])) for match in _WORD.finditer(text)]
    start = max(0, _best_start([hit for hit in found if hit[2] in wanted], chars) - chars // 4)
    start = min(start, len(text) - chars)
    part = text[start : start + chars]
    if start > 0:
        part = part.partition(" ")[2] or part
    if start + chars < len(text):
        part = part.rpartition(" ")[0] or part
    return part


def _best_start(hits: Sequence[tuple[int, int, str]], chars: int) -> int:
    """Return the start of the window with the most different words; each window begins at a hit."""
    ends = [end for _, end, _ in hits]

    def words(first: int) -> int:
        inside = hits[first : bisect_right(ends, hits[first][0] + chars * 3 // 4)]
        return len({word for _, _, word in inside})

    best = max(range(len(hits)), key=words, default=0)
    return hits[best][0] if hits and words(best) else 0


def bm25_from_setup(setup: Setup) -> Bm25:
    """Open the corpus that the options name: `corpus` (a file or folder below the data, default corpus.jsonl), `corpus_sha256`,
    `snippet_chars`. Graders refuse a corpus other than the recipe's (ValueError); an agent's may be a part of it."""
    options, root = setup.options, Path(setup.data).resolve()
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
    """Write JSON lines in ASCII with sorted keys, so that equal documents give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document._asdict(), sort_keys=True) + "\n" for document in documents)
    path.write_text("".join(lines), encoding="ascii", newline="\n")


# --- `online`: a search engine on the internet that answers in JSON
# Options: `search_url`: an address with `{query}`, and optionally `{results}` and `{key}`; `search_list`: path of the results in
# the answer; `search_title`, `search_link`, `search_snippet`: their fields; `search_key_file`, `search_key_header`: the key and its
# header; `search_date`: a label for the time (`2026-11`); `search_empty`: how the engine says "nothing found" other than by an empty
# list (`error=No results.`, or a field that is present only then). Any other form of answer is a failure, never "nothing found".
# The model's query is sent to the engine; an address that a model writes is never opened.

ONLINE_VERSION = "2"
TIMEOUT_S = 20.0
TRIES = 3
FIRST_PAUSE_S = 2.0  # Doubles with each try. All tries together take less than the 120 s of an environment's step.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_KEY_BYTES = 4096
MAX_QUERY_CHARS = 400  # Engines refuse longer queries
FIELDS = {"search_list": "organic_results", "search_title": "title", "search_link": "link", "search_snippet": "snippet"}
EMPTY = "search_empty"
ERRORS = ("error", "errors")
"""Fields by which engines report errors (a quota, an expired key), also with HTTP status 200."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # Status codes after which the same request may succeed
_PLACE = re.compile(r"\{(query|results|key)\}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would carry the key to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def identity_of(options: Mapping[str, Any]) -> str:
    """Return the identity under which results are recorded: address without the key, fields, date. Raises ValueError if an option
    is missing or wrong."""
    address = str(options.get("search_url", ""))
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or "{query}" not in address:
        raise ValueError("option `search_url` must be an http or https address with {query} in it")
    if parts.username is not None or parts.password is not None:
        raise ValueError("option `search_url` holds a password: use `search_key_file`")
    date = str(options.get("search_date", ""))
    if not date:
        raise ValueError("option `search_date` is missing: say of when the results are, such as 2026-11")
    fields = " ".join(str(options.get(name, default)) for name, default in FIELDS.items())
    if options.get(EMPTY):
        fields += f" {EMPTY} {options[EMPTY]}"
    return f"online/{ONLINE_VERSION} {address} fields {fields} date {date}"


class Online:
    """A search engine at an address; `first_pause_s`: see `FIRST_PAUSE_S`."""

    def __init__(self, options: Mapping[str, Any], key: str = "", *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.identity = identity_of(options)
        self._address = str(options["search_url"])
        self._host = urllib.parse.urlsplit(self._address).hostname or ""
        self._fields = {name: str(options.get(name, default)) for name, default in FIELDS.items()}
        self._empty = str(options.get(EMPTY, ""))
        self._key, self._first_pause_s = key, first_pause_s
        header = str(options.get("search_key_header", ""))
        self._headers = {"Accept": "application/json", "User-Agent": "autorl-hpc", **({header: key} if header else {})}
        if not key and (header or "{key}" in self._address):
            raise ValueError("option `search_key_file` is missing: the address or a header wants a key")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def search(self, query: str, k: int) -> list[Result]:
        values = {"query": query[:MAX_QUERY_CHARS], "results": str(k), "key": self._key}
        quoted = {name: urllib.parse.quote(value.encode("utf-8", "replace"), "") for name, value in values.items()}
        answer = self._asked(_PLACE.sub(lambda place: quoted[place[1]], self._address))
        path, equals, text = self._empty.partition("=")
        said = _at(answer, path)
        value = isinstance(said, (str, int, float))
        if self._empty and ((equals and value and str(said) == text) or (not equals and said)):
            return []
        advice = "" if self._empty else f"; if that means nothing was found, say so in `{EMPTY}`"
        for name in ERRORS:
            if isinstance(answer, dict) and answer.get(name):
                raise SearchFailed(f"the answer of {self._host} holds `{name}`{advice}")
        rows = _at(answer, self._fields["search_list"])
        if not isinstance(rows, list) or any(not isinstance(row, dict) for row in rows):
            raise SearchFailed(
                f"the answer of {self._host} has no list of objects at `{self._fields['search_list']}`{advice}"
            )
        columns = ("search_title", "search_link", "search_snippet")
        for option in columns:  # a field that all rows lack is misspelt
            if rows and not any(self._fields[option] in row for row in rows):
                raise SearchFailed(f"no result of {self._host} has the field `{self._fields[option]}` ({option})")
        texts = [[str(row.get(self._fields[option]) or "") for option in columns] for row in rows[:k]]
        return [Result(title, url, " ".join(text.split())) for title, url, text in texts]

    def _asked(self, address: str) -> Any:
        problem = ""
        for number in range(TRIES):
            if number:
                time.sleep(self._first_pause_s * 2 ** (number - 1))
            try:
                # No message of urllib is passed on, because it may hold the address and with it the key.
                request = urllib.request.Request(address, headers=self._headers)
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    data = answer.read(MAX_ANSWER_BYTES + 1)
                if len(data) > MAX_ANSWER_BYTES:
                    raise SearchFailed(f"the answer of {self._host} is longer than {MAX_ANSWER_BYTES} bytes")
                return json.loads(data)
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                error.close()
                if error.code not in PASSING:
                    break
            except (OSError, ValueError, RecursionError) as error:
                problem = "no JSON" if isinstance(error, (ValueError, RecursionError)) else type(error).__name__
        raise SearchFailed(f"the search engine at {self._host} could not be asked: {problem}")


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def read_key(path: Path) -> str:
    """Read the key from a file that only its owner may read. No error shows any part of it."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        data = file.read(MAX_KEY_BYTES + 1)
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others may read the key in {path}: run chmod 600 {path}")
    key = data.decode("ascii", "replace").strip()
    if len(data) > MAX_KEY_BYTES or not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{path} holds no key: put the key alone into it")
    return key


# --- recorded results: each query is sent once, and every model gets the same results
# One small JSON file per answer, by the sha256 of back end, query and number of results, in `.search-cache` beside the vaults.
# `online` reads and writes it; `replay` only reads: a query that was not recorded is the grader's error, never an empty result.

FORMAT = 1  # Format version of the files; other versions are ignored
FOLDER = ".search-cache"


def folder_of(setup: Setup) -> Path:
    """Return the folder of recorded results: beside the tasks' vaults, or for agents in their data."""
    data = Path(setup.data)
    return (data.parent if setup.held_out else data) / FOLDER


def key_of(identity: str, query: str, k: int) -> str:
    """Return the name of a recorded answer. Extra white space in the query is ignored."""
    asked = {"backend": identity, "query": " ".join(query.split()), "results": k}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode("ascii")).hexdigest()


class RecordedAnswers:
    """A folder of recorded answers, which several processes may use at once. A query that has none is asked of `backend` and
    recorded, or fails without a back end."""

    def __init__(self, identity: str, folder: Path, backend: SearchBackend | None = None) -> None:
        self.identity, self.folder, self.backend = identity, folder, backend

    def search(self, query: str, k: int) -> list[Result]:
        key = key_of(self.identity, query, k)
        path = self.folder / key[:2] / f"{key}.json"
        found = _recorded(path, key)
        if found is not None:
            return found
        if self.backend is None:
            name = f"recorded answer {key[:16]} for the query {query[:80]!r}"
            if os.path.lexists(path):
                advice = "put the original back, or ask the engine again"
                raise SearchFailed(f"the {name} is damaged or can't be read: {advice}")
            raise SearchFailed(f"no {name}: it was not asked before")
        found = self.backend.search(query, k)
        value = {"format": FORMAT, "key": key, "backend": self.identity, "query": query}
        try:
            self._record(path, {**value, "found": [[*row] for row in found]})
        except OSError as error:
            raise SearchFailed(f"the results can't be recorded: {error.strerror}") from error
        # Another process may have recorded other results first; all use the recorded ones.
        return _recorded(path, key) or found

    def _record(self, path: Path, value: Mapping[str, Any]) -> None:
        """Store an answer atomically. A readable one is kept, because results must not change under a recipe."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(json.dumps(value, sort_keys=True, indent=1).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            if _recorded(path, value["key"]) is None:
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _recorded(path: Path, key: str) -> list[Result] | None:
    """Return the answer in a file; None if there is none or it is damaged."""
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != FORMAT or value["key"] != key:
            return None
        rows = [Result(*row) for row in value["found"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return rows if all(isinstance(part, str) for row in rows for part in row) else None


def _online(setup: Setup) -> SearchBackend:
    file = setup.options.get("search_key_file")
    engine = Online(setup.options, read_key(Path(str(file)).expanduser()) if file else "")
    recorded = setup.options.get("search_record", True)
    return RecordedAnswers(engine.identity, folder_of(setup), engine) if recorded else engine


BACKENDS: dict[str, Callable[[Setup], SearchBackend]] = {
    "bm25": bm25_from_setup,
    "online": _online,
    "replay": lambda setup: RecordedAnswers(identity_of(setup.options), folder_of(setup)),
}

"""A search engine on the internet that answers in JSON. Asked only where a recipe's option `search` says `online`.

Options: `search_url`: an address with `{query}`, and `{results}` and `{key}` where the engine wants them; `search_list`: where
the results stand in its answer (`organic_results`, or `web.results`); `search_title`, `search_link`, `search_snippet`: names of
their fields; `search_key_file`: a file with the key alone; `search_key_header`: the header that takes it, where it is not in
the address; `search_date`: a word for when (`2026-11`): what engines find changes, so the recipe says of when a score is;
`search_empty`: how the engine says that it found nothing, where that is no empty list: a field and its text, `error=No results.`
or `search.total=0`, or a field alone that is there then. An answer in any other form is a failure, never "nothing found": what
was found is recorded and stays.

What a model writes is sent to that engine as a query. No address that a model writes is ever opened.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.search.backend import Result, SearchFailed, Setup

VERSION = "2"
TIMEOUT_S = 20.0
TRIES = 3
FIRST_PAUSE_S = 2.0
"""Doubles with each further try. All tries together stay below the 120 s that an environment's step may take."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_KEY_BYTES = 4096
MAX_QUERY_CHARS = 400
"""More than that is no query, and engines refuse it."""
FIELDS = {"search_list": "organic_results", "search_title": "title", "search_link": "link", "search_snippet": "snippet"}
EMPTY = "search_empty"
ERRORS = ("error", "errors")
"""Fields by which engines say what went wrong, also under HTTP status 200: a quota, a key that ran out."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed."""
_PLACE = re.compile(r"\{(query|results|key)\}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An answer that leads elsewhere would carry the key there."""

    def redirect_request(self, *_: Any) -> None:
        return None


def identity_of(options: Mapping[str, Any]) -> str:
    """What results are recorded under: address without the key, fields, date.

    Raises:
        ValueError: an option is missing or wrong.
    """
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
    return f"online/{VERSION} {address} fields {fields} date {date}"


class Online:
    """An engine at an address.

    Args:
        first_pause_s: see `FIRST_PAUSE_S`.
    """

    def __init__(self, options: Mapping[str, Any], key: str = "", *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.identity = identity_of(options)
        self._address = str(options["search_url"])
        self._host = urllib.parse.urlsplit(self._address).hostname or ""
        self._fields = {name: str(options.get(name, default)) for name, default in FIELDS.items()}
        self._empty = str(options.get(EMPTY, ""))
        self._header = str(options.get("search_key_header", ""))
        self._key = key
        self._first_pause_s = first_pause_s
        if not key and (self._header or "{key}" in self._address):
            raise ValueError("option `search_key_file` is missing: the address or a header wants a key")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def search(self, query: str, k: int) -> list[Result]:
        """See the Protocol."""
        values = {"query": query[:MAX_QUERY_CHARS], "results": str(k), "key": self._key}
        address = _PLACE.sub(
            lambda place: urllib.parse.quote(values[place[1]].encode("utf-8", "replace"), ""), self._address
        )
        answer = self._asked(address)
        if self._empty and _says(answer, self._empty):
            return []
        for name in ERRORS:
            if isinstance(answer, dict) and answer.get(name):
                raise SearchFailed(f"the answer of {self._host} holds `{name}`{self._advice()}")
        rows = _at(answer, self._fields["search_list"])
        if not isinstance(rows, list):
            raise SearchFailed(
                f"the answer of {self._host} has no list at `{self._fields['search_list']}`{self._advice()}"
            )
        self._check(rows)
        return [self._result(row) for row in rows[:k]]

    def _advice(self) -> str:
        return "" if self._empty else f"; if that means nothing was found, say so in `{EMPTY}`"

    def _check(self, rows: list[Any]) -> None:
        """A row may lack one field; a field that none has is misspelt.

        Raises:
            SearchFailed: these are no results.
        """
        if any(not isinstance(row, dict) for row in rows):
            raise SearchFailed(f"a result of {self._host} is no object")
        for option in ("search_title", "search_link", "search_snippet"):
            if rows and not any(self._fields[option] in row for row in rows):
                raise SearchFailed(f"no result of {self._host} has the field `{self._fields[option]}` ({option})")

    def _result(self, row: Mapping[str, Any]) -> Result:
        title, url, text = (str(row.get(self._fields[f"search_{name}"]) or "") for name in ("title", "link", "snippet"))
        return Result(title, url, " ".join(text.split()))

    def _asked(self, address: str) -> Any:
        headers = {"Accept": "application/json", "User-Agent": "autorl-hpc"}
        if self._header:
            headers[self._header] = self._key
        problem = ""
        for number in range(TRIES):
            if number:
                time.sleep(self._first_pause_s * 2 ** (number - 1))
            try:
                # No message of urllib's is passed on: it may hold the address, and with it the key.
                with self._opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S) as answer:
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
    """What stands at a path of names with dots between them, None where there is nothing."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _says(answer: Any, form: str) -> bool:
    """Whether an answer has the form of `search_empty`."""
    path, equals, text = form.partition("=")
    found = _at(answer, path)
    return str(found) == text if equals and isinstance(found, (str, int, float)) else bool(found and not equals)


def from_setup(setup: Setup) -> Online:
    """The engine that the options name, with its key.

    Raises:
        OSError, ValueError: an option is missing or wrong, the key can't be read or is open to others.
    """
    file = setup.options.get("search_key_file")
    return Online(setup.options, read_key(Path(str(file)).expanduser()) if file else "")


def read_key(path: Path) -> str:
    """The key that stands alone in a file which only its owner may read. No error shows any of it."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        data = file.read(MAX_KEY_BYTES + 1)
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others may read the key in {path}: run chmod 600 {path}")
    key = data.decode("ascii", "replace").strip()
    if len(data) > MAX_KEY_BYTES or not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{path} holds no key: put the key alone into it")
    return key

"""Searches that are recorded and replayed: what stays, what is damaged, who may read it."""

from __future__ import annotations

import json
from pathlib import Path

import corpora
import pytest

from autorl_hpc.rollouts.search.backends import RecordedAnswers, Result, SearchFailed, key_of

no_connections = corpora.no_connections
NAME = "counting/1"


class Counting:
    """A back end that answers each time otherwise."""

    identity = NAME

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, k: int) -> list[Result]:
        self.asked.append((query, k))
        if query == "fails":
            raise SearchFailed("away")
        return [Result(f"{query} é \ud83d", "u", f"answer {len(self.asked)}")] if query != "nothing" else []


def test_what_was_asked_once_stays_and_can_be_replayed(tmp_path: Path) -> None:
    backend = Counting()
    recording = RecordedAnswers(NAME, tmp_path / "cache", backend)
    first = recording.search("tesh river", 3)
    assert recording.search(" tesh  river\n", 3) == first and len(backend.asked) == 1
    assert recording.search("tesh river", 2) != first, "another number of results is another question"
    assert recording.search("nothing", 3) == [] == recording.search("nothing", 3)
    assert len(backend.asked) == 3
    replay = RecordedAnswers(NAME, tmp_path / "cache")
    assert replay.search("tesh river", 3) == first
    assert replay.search("nothing", 3) == [], "that nothing was found was recorded"
    assert len(backend.asked) == 3

    class Slow(Counting):
        def search(self, query: str, k: int) -> list[Result]:
            assert recording.search(query, k)  # another grader, which asked later and was answered first
            return [Result("late", "", "")]

    late = RecordedAnswers(NAME, tmp_path / "cache", Slow()).search("loom", 3)
    assert late == replay.search("loom", 3) == recording.search("loom", 3) != [Result("late", "", "")]


def test_a_miss_of_a_replay_is_an_error_and_no_empty_result(tmp_path: Path) -> None:
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    for query, k, identity in (("b", 3, "counting/1"), ("a", 4, "counting/1"), ("a", 3, "counting/2")):
        with pytest.raises(SearchFailed, match="it was not asked before"):
            RecordedAnswers(identity, tmp_path).search(query, k)


@pytest.mark.parametrize(
    "change", [None, [], {"key": "0" * 64}, {"format": 2}, {"found": [["a", "b"]]}, {"found": [["a", "b", 3]]}]
)
def test_a_damaged_record_is_none_and_is_made_anew(tmp_path: Path, change: object) -> None:
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_bytes()
    changed = json.dumps({**json.loads(whole), **change} if isinstance(change, dict) else change)
    path.write_bytes(whole[:40] if change is None else changed.encode())
    with pytest.raises(SearchFailed, match="for the query 'a' is damaged"):
        RecordedAnswers(NAME, tmp_path).search("a", 3)
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    assert path.read_bytes() == whole and not list(tmp_path.rglob(".tmp*"))


def test_records_are_for_their_owner_alone_and_named_by_content(tmp_path: Path) -> None:
    RecordedAnswers(NAME, tmp_path / "c", Counting()).search("a", 3)
    (path,) = tmp_path.rglob("*.json")
    assert path.stem == key_of("counting/1", "a", 3) and path.parent.name == path.stem[:2]
    assert (
        path.stat().st_mode & 0o077
        == path.parent.stat().st_mode & 0o077
        == (tmp_path / "c").stat().st_mode & 0o077
        == 0
    )

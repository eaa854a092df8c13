"""Cluster profiles: those that ship, how they are found, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import yaml

from autorl_hpc.cluster.profile import PATH_VARIABLE, load_profile, profile_names, scratch_folder
from autorl_hpc.errors import AutorlError, Exit

REPO = Path(__file__).resolve().parents[2]
SHIPPED = sorted((REPO / "jobs" / "clusters").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without profiles, with nothing of the person who runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PATH_VARIABLE, raising=False)


def write(path: Path, **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"name": path.stem, **fields}))
    return path


def refused(tmp_path: Path, **fields: Any) -> AutorlError:
    """What is said of a profile with these fields."""
    with pytest.raises(AutorlError) as caught:
        load_profile(str(write(tmp_path / "mine.yaml", **fields)))
    assert caught.value.where == str(tmp_path / "mine.yaml") and caught.value.next_step
    assert caught.value.exit_code is Exit.USAGE
    return caught.value


# those that ship


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_is_found_by_its_name_and_says_what_it_is(path: Path) -> None:
    profile = load_profile(path.stem)
    assert profile.name == path.stem in profile_names()
    assert profile.description
    assert load_profile(str(path)) == profile


# how they are found


def test_the_users_own_stand_before_those_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "jobs" / "clusters" / "slurm-sandbox.yaml", partition="here")
    assert load_profile("slurm-sandbox").partition == "here"
    write(tmp_path / "a" / "slurm-sandbox.yaml", partition="by variable")
    write(tmp_path / "b" / "slurm-sandbox.yaml", partition="too late")
    write(tmp_path / "b" / "other.yaml")
    monkeypatch.setenv(PATH_VARIABLE, f"{tmp_path / 'a'}::{tmp_path / 'b'}")
    assert load_profile("slurm-sandbox").partition == "by variable"
    assert load_profile("other").name == "other"
    assert {"other", "local"} <= set(profile_names())


# wrong ones


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partitoin": "gpu"}, "field `partitoin`: unknown field; did you mean `partition`?"),
        ({"report": {"gpu": 1}}, "field `report.gpu`: unknown field; did you mean `gpus`?"),
        ({"zzz": 1}, "field `zzz`: unknown field; known are account, agent"),
        ({"agent": {"memory": "64 GB"}}, "field `agent.memory`"),
        ({"agent": {"time": "soon"}}, "field `agent.time`: a duration is a number of seconds or text such as 20m"),
        ({"agent": 4}, "field `agent`: must be a table of fields"),
        ({"gpu_wording": "--gres"}, "field `gpu_wording`"),
        ({"container": {"runtime": "apptainer"}}, "field `container.image`: this field is missing"),
        ({"name": "../mine"}, "field `name`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    error = refused(tmp_path, **fields)
    assert words in error.what
    assert error.next_step == "see docs/clusters.md for every field"


# scratch


def scratch(text: str | None) -> Path | None:
    return scratch_folder(plans.profile(**({} if text is None else {"scratch": text})), "exp.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$NOT_SET_HERE/x", r"field `scratch`: \$NOT_SET_HERE is not set on this host"),
        ("/a/${NOT_SET_HERE}", r"field `scratch`: \$NOT_SET_HERE is not set on this host"),
        ("a/b", "field `scratch`: a/b is not an absolute path"),
        ("./a", "is not an absolute path"),
        ("$RELATIVE/x", "field `scratch`: here/x is not an absolute path"),
    ],
)
def test_a_scratch_that_nodes_would_not_find_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    monkeypatch.setenv("RELATIVE", "here")
    with pytest.raises(AutorlError, match=words) as caught:
        scratch(text)
    assert caught.value.where == "exp.yaml" and caught.value.next_step

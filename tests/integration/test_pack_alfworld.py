"""bin/pack-alfworld: official games in, the pinned files out. The zips are rebuilt from the pinned files, as the official one is laid
out; that one itself is 2 GB and is not here."""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import needs
import pytest

from autorl_hpc.tasks.loader import load_task

REPO = Path(__file__).resolve().parents[2]
TOOL = REPO / "bin" / "pack-alfworld"


def packed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def game_files(row: dict[str, Any], domain: str, grammar: str) -> tuple[str, str]:
    """game.tw-pddl and traj_data.json of a packed row, with fields in the official files that packing drops."""
    game = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL.", row["task"]),
        "pddl_problem": row["pddl_problem"],
        "solvable": row["solvable"],
        "walkthrough": row["walkthrough"],
    }
    told = {
        "images": [],
        "task_type": row["task_type"],
        "pddl_params": dict(reversed(row["pddl_params"].items())),
        "turk_annotations": {"anns": [{"task_desc": text, "votes": [1]} for text in row["anns"]]},
    }
    return json.dumps(game), json.dumps(told)


def zips(official: Path, folder: Path, rows_of: dict[str, int | None]) -> tuple[Path, Path]:
    """The two archives, with at most so many games of each split."""
    domain = (official / "pddl_domain.in_games.pddl").read_text()
    grammar = (official / "grammar.in_games.twl2").read_text()
    games, told = folder / "tw-pddl.zip", folder / "json.zip"
    with zipfile.ZipFile(games, "w") as first, zipfile.ZipFile(told, "w") as second:
        for split, count in rows_of.items():
            with lzma.open(official / f"{split}.jsonl.xz", "rt") as file:
                rows = [json.loads(line) for line in file][:count]
            for row in reversed(rows):  # the order in a zip is nobody's promise
                game, trajectory = game_files(row, domain, grammar)
                first.writestr(f"json_2.1.1/{row['id']}/game.tw-pddl", game)
                second.writestr(f"json_2.1.1/{row['id']}/traj_data.json", trajectory)
        unsolvable = json.dumps({**json.loads(game), "solvable": False})
        first.writestr("json_2.1.1/valid_seen/a-b-c-d-1/trial_T1/game.tw-pddl", unsolvable)
        first.writestr("json_2.1.1/valid_seen/pick_movable-b-c-d-1/trial_T1/game.tw-pddl", game)
        second.writestr("json_2.1.1/valid_seen/no-game-c-d-1/trial_T1/traj_data.json", trajectory)
    return games, told


@pytest.fixture(scope="module")
def official(data: Path) -> Path:
    folder = data / "alfworld"
    if not folder.is_dir():
        needs.skip("data", "the real data are not here: set AUTORL_TEST_DATA to a folder with alfworld/")
    return folder


def test_the_held_out_games_come_out_as_pinned_byte_by_byte(official: Path, tmp_path: Path) -> None:
    sources = zips(official, tmp_path, {"valid_seen": None, "valid_unseen": None, "train": 20})
    done = packed(*sources, "--to", tmp_path / "out")
    assert done.returncode == 1, done.stderr  # the training games are only some
    assert "train.jsonl.xz: NOT the pinned file" in done.stdout
    pins = {source.file: source.sha256 for source in load_task("alfworld").file.sources}
    for name in ("valid_seen.jsonl.xz", "valid_unseen.jsonl.xz", "pddl_domain.in_games.pddl", "grammar.in_games.twl2"):
        assert f"{name}: as pinned" in done.stdout
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == pins[name]
    with (
        lzma.open(tmp_path / "out" / "train.jsonl.xz", "rt") as made,
        lzma.open(official / "train.jsonl.xz", "rt") as real,
    ):
        assert made.readlines() == [next(real) for _ in range(20)]


def test_a_folder_does_as_well_as_a_zip(official: Path, tmp_path: Path) -> None:
    games, told = zips(official, tmp_path, {"valid_unseen": 3})
    for archive in (games, told):
        zipfile.ZipFile(archive).extractall(tmp_path / "games")
    assert (
        packed(games, told, "--to", tmp_path / "a").returncode
        == packed(tmp_path / "games", "--to", tmp_path / "b").returncode
        == 1
    )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

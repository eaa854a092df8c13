"""Fixtures of the contract tests: each stored experiment unpacked and reported once, and the option that writes golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract import Place, Stored, damage, golden, listing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden files of tests/contract anew")


@pytest.fixture(scope="session")
def check(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    write = bool(request.config.getoption("--write-golden", False))
    return lambda name, value: golden(name, value, write=write)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    name = request.param
    place = Place(tmp_path_factory.mktemp(name))
    folder = place.unpack("finished" if name == "damaged" else name)
    if name == "damaged":
        damage(folder)
    code = 1 if name == "damaged" else 0
    before = listing(folder)
    status = place.facts("status", folder)
    verdicts = place.facts("verify", folder, code=code)
    reported = place.facts("report", folder, "--quiet", *(() if name == "finished" else ["--no-figures"]))
    return Stored(name, place, folder, before, status, verdicts, reported)

"""Bundles of the smallest task and model, and a root into which they are unpacked or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import archive
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.stage import Ways
from autorl_hpc.stage.stage import stage as stage_all

NAMES = ["arithmetic", "tiny"]


def stage(
    root: Root, names: list[str], *, say: Callable[[str], None] = lambda _: None, **ways: Any
) -> list[dict[str, Any]]:
    return stage_all(root, names, Ways(**ways), say)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


@pytest.fixture(scope="module")
def bundles(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bundle of each packing."""
    folder = tmp_path_factory.mktemp("bundles")
    made = {suffix: folder / f"b{suffix}" for suffix in archive.SUFFIXES}
    for path in made.values():
        stage(Root(staged), NAMES, bundle=path)
    return made


def files(root: Root) -> list[str]:
    return sorted(p.relative_to(root.path).as_posix() for p in root.path.rglob("*") if p.is_file() or p.is_symlink())


def refused(root: Root, bundle: Path, words: str, code: Exit = Exit.FAILED, names: list[str] | None = None) -> None:
    with pytest.raises(AutorlError) as caught:
        stage(root, names or [], source=bundle)
    assert words in caught.value.what, caught.value.what
    assert caught.value.next_step and caught.value.exit_code is code
    assert files(root) == [], "something was left"
    assert {p.name for p in root.path.parent.iterdir()} <= {"root", bundle.name}, "something was written elsewhere"

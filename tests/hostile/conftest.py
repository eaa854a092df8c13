"""Two nodes with a shared file system of the bad kind; every test here skips, saying why, where they can't be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

pytest.register_assert_rewrite("world")

from helpers import Cluster  # noqa: E402
from hostile_world import World  # noqa: E402
from nodes import Node, what_is_missing  # noqa: E402


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips where mounts or namespaces can't be had."""
    missing = what_is_missing()
    if missing:
        needs.skip("fuse", f"no lagging file system here: {missing}")


@pytest.fixture
def new_node(possible: None, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Makes nodes; all are unmounted at the end."""
    made: list[Node] = []

    def new(name: str, backing: Path, **options: Any) -> Node:
        made.append(Node(name, backing, tmp_path, **options))
        return made[-1]

    try:
        yield new
    finally:
        for node in made:
            node.unmount()


@pytest.fixture(scope="session")
def mini(possible: None, staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A root with a task of four items staged, to be copied."""
    made = Cluster(staged, tmp_path_factory.mktemp("mini"))
    made.mini_task()
    return made


@pytest.fixture
def world(mini: Cluster, tmp_path: Path, new_node: Callable[..., Node]) -> Iterator[World]:
    """Two nodes and a root that both see."""
    made = World(mini, tmp_path, new_node)
    try:
        yield made
    finally:
        made.end()

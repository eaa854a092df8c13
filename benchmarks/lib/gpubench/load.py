"""The engine's way of reading a checkpoint against reading alone and against reading and sha256, by turns."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from gpubench.cold import forget
from gpubench.figures import Figures
from gpubench.swap import STAYED
from gpubench.world import World

ROUNDS = 5
CHUNK_BYTES = 8 * 1024 * 1024


def measure(world: World, figures: Figures) -> None:
    """Rates and their ratios, cold and warm; medians of ratios that were taken in one turn each."""
    science = world.science(world.options.static_task)
    engine = world.engine(science)
    size = world.variants.make(0).size_bytes
    for cold in (True, False):
        word, stayed = ("from the disk" if cold else "from the page cache"), 0.0
        rows: list[tuple[float, float, float]] = []
        for number in range(min(ROUNDS, world.options.rounds)):
            made = world.variants.make((400 if cold else 500) + number)
            taken = []
            for way in (_read, _hash, None):
                if cold:
                    stayed = max(stayed, forget(made.folder))
                if way is not None:
                    taken.append(way(made.folder))
                else:
                    loaded = engine.load(made.folder, made.content_hash)
                    taken.append(loaded.load_s)
            rows.append((taken[0], taken[1], taken[2]))
        if cold and stayed > STAYED:
            figures.missing(f"loading {word}", f"the pages can't be dropped here: {100 * stayed:.0f} % stayed")
            continue
        for name, column in (("reading alone", 0), ("reading and sha256", 1), ("the engine's load, verified", 2)):
            figures.show(f"{name}, {word}, {size / 1e6:.0f} MB", [size / 1e6 / row[column] for row in rows], "MB/s")
        figures.show(
            f"load's rate against reading alone, {word}",
            [100 * row[0] / row[2] for row in rows],
            "%",
            above=80 if cold else None,
        )
        figures.show(
            f"load's rate against reading and sha256, {word}",
            [100 * row[1] / row[2] for row in rows],
            "%",
            above=None if cold else 80,
        )


def _read(folder: Path) -> float:
    """Seconds of reading all weights, one big read after the other, into one buffer."""
    started, buffer = time.monotonic(), bytearray(CHUNK_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY)
        try:
            while os.readv(fd, [buffer]):
                pass
        finally:
            os.close(fd)
    return time.monotonic() - started


def _hash(folder: Path) -> float:
    """The same with a sha256 over it, in one thread."""
    started, buffer, digest = time.monotonic(), bytearray(CHUNK_BYTES), hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY)
        try:
            while got := os.readv(fd, [buffer]):
                digest.update(memoryview(buffer)[:got])
        finally:
            os.close(fd)
    return time.monotonic() - started

"""Differences of an agent's texts by lines: as git's own, and in bounded time."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import needs

from autorl_hpc.report.run_story.context import MAX_LINES, Differ, line_diff, text_lines


@needs.needs("git", shutil.which("git") is not None, "git is not installed")
def test_git_applies_our_diffs(tmp_path: Path) -> None:
    chance = random.Random(2)
    for _ in range(100):
        old, new = (
            "".join(chance.choice(["a\n", "b\n", "c\r\n", "d\x0c\n"]) for _ in range(chance.randint(1, 30)))
            for _ in range(2)
        )
        new = new[:-1] if chance.random() < 0.3 else new
        if old == new:
            continue
        (tmp_path / "f").write_bytes(old.encode())
        added, removed, lines = line_diff(text_lines(old), text_lines(new))
        assert added - removed == len(new.rstrip("\n").split("\n")) - len(old.rstrip("\n").split("\n"))
        patch = "\n".join(["--- a/f", "+++ b/f", *lines, ""])
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / "f").read_bytes() == new.encode()


def test_texts_made_to_be_slow_are_counted_and_not_shown() -> None:
    """An agent's texts must not hold a report for hours: neither a long one nor many of them."""
    differ, begun = Differ(lines=3 * MAX_LINES), time.process_time()
    long = b"".join(b"%d\n" % number for number in range(MAX_LINES + 1))
    (change,) = differ.between({"f": long}, {"f": long + b"more\n"}).changes
    assert (change.added, change.removed) == (1, 0)
    shown = list[bool]()
    before = b"".join(b"%d\n" % (number % 103) for number in range(MAX_LINES))
    for turn in range(3):
        after = b"".join(b"%d\n" % ((number * 50 + turn) % 103) for number in range(MAX_LINES))
        shown.append("too much" not in str(differ.between({"f": before}, {"f": after}).diff))
    assert shown == [True, False, False] and time.process_time() - begun < 30.0

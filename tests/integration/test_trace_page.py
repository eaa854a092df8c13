"""The trace's page in a real browser, from a file: silent, jumps, search, one file, on a phone; 20,000 turns open in under 2 s."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from test_report_page import CHROMIUM, ask, chromium

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_turns import HOSTILE, item, lines, run_with
from treemaker import Tree

from autorl_hpc.report import pages
from autorl_hpc.report.run_summary import digest

pytestmark = needs.needs("chromium", CHROMIUM is not None, "chromium is not installed")

OPENS_S = 2.0


def report_of(folder: Path, log: bytes, *, one_file: bool = False) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        run = run_with(Tree(folder / "runs" / "exp"), log)
        return pages.write_run(digest(run.dir), run.dir, folder, pages.Writing(one_file=one_file)) / "trace.html"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    log = b"".join(item(n, f"python train.py {n}", int(n == 350)) for n in range(400)) + lines(HOSTILE["html"])
    yield report_of(tmp_path_factory.mktemp("trace"), log)


def dom(tmp_path: Path, address: str, *args: str) -> str:
    got = chromium(tmp_path, "--virtual-time-budget=5000", *args, "--dump-dom", address)
    assert "CONSOLE" not in got.stderr, got.stderr
    return got.stdout


def test_first_page_jump_and_failure(tmp_path: Path, trace: Path) -> None:
    first = dom(tmp_path, trace.as_uri())
    assert 'id="e0"' in first and 'id="e350"' not in first, "one page of several"
    assert "Submission 1: 30.0" in first and "alert(1)" not in first
    assert not re.search(r'(?:src|href)="(?:https?:)?//', first), "nothing from elsewhere"
    there = dom(tmp_path, trace.as_uri() + "#e350")
    assert re.search(r'id="e350"[^>]*>|class="turn here" id="e350"', there) and "exit code 1" in there
    assert '<details class="part" open' in there, "the failure is unfolded"
    last = dom(tmp_path, trace.as_uri() + "#e400")
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in last and "<img" not in last


def test_search_goes_through_all_pages(tmp_path: Path, trace: Path) -> None:
    planted = trace.with_name("planted.html")
    planted.write_text(
        trace.read_text().replace('placeholder="words in turns"', 'placeholder="" autofocus value="OUT 377"')
    )
    shutil.copytree(trace.parent / "trace", tmp_path / "trace")
    page = tmp_path / "page.html"
    page.write_text(planted.read_text())
    found = ask(
        tmp_path,
        page,
        """
        const done = () => { found.text = d.getElementById("found").textContent;
          found.turns = [...d.querySelectorAll(".turn")].map((it) => it.id);
          document.getElementById("found").textContent = JSON.stringify(found); };
        setTimeout(() => { d.getElementById("search").dispatchEvent(new w.Event("input")); setTimeout(done, 3000); }, 500);
        """,
        1200,
        "--virtual-time-budget=9000",
    )
    assert found["turns"] == ["e377"] and found["text"].startswith("1 entries in pages 1 to 5 of 5"), found


def test_one_file_alone_and_on_a_phone(tmp_path: Path) -> None:
    page = report_of(tmp_path / "made", b"".join(item(n, "x" * 3000) for n in range(150)), one_file=True)
    assert not (page.parent / "trace").exists()
    alone = tmp_path / "alone.html"
    shutil.copy(page, alone)
    script = 'setTimeout(() => { found.wide = d.documentElement.scrollWidth; found.turns = d.querySelectorAll(".turn").length;'
    script += ' document.getElementById("found").textContent = JSON.stringify(found); }, 2000);'
    found = ask(tmp_path, alone, script, 360, "--virtual-time-budget=5000")
    assert found == {"wide": 360, "turns": 100}, "nothing is wider than the screen"


@pytest.mark.soak
def test_a_trace_of_20000_turns_and_100_mb_opens_in_two_seconds(tmp_path: Path) -> None:
    """Until the first page is laid out, by the page's own clock; without any file but the index and the first page's."""
    body = "step 12 loss 0.123 grad_norm 1.5 reward 0.2 epoch 3 of the training\n" * 63
    log = tmp_path / "agent.log"
    with log.open("wb") as file:
        for n in range(20_000):
            file.write(item(n, f"python train.py {n}").replace(b"out ", body.encode().replace(b"\n", b"\\n")))
    assert log.stat().st_size > 80e6
    begun = time.monotonic()
    page = report_of(tmp_path / "made", log.read_bytes())
    print(
        f"report: {time.monotonic() - begun:.0f} s, {sum(f.stat().st_size for f in page.parent.rglob('*')) / 1e6:.0f} MB"
    )
    opened = []
    for _ in range(3):
        got = chromium(tmp_path, "--timeout=20000", "--dump-dom", page.as_uri())
        opened.append(int(re.search(r'data-shown="(\d+)"', got.stdout)[1]) / 1000)  # type: ignore[index]
    print(f"opens in {sorted(opened)} s")
    assert min(opened) < OPENS_S

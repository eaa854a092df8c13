"""What is written: the files, the same bytes twice, and nothing of what an agent wrote that is not text."""

from __future__ import annotations

import base64
import csv
import hashlib
import html.parser
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from rich.console import Console
from treemaker import Tree, outcomes
from typer.testing import CliRunner

from autorl_hpc.cli import app
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.report import report as api
from autorl_hpc.report.terminal import print_summary
from autorl_hpc.states import EndedBy, Fault

HOSTILE = '=cmd()|"<script>alert(1)</script>\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\x00\n# head | ![x](http://evil/x) <img src=x>'


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "runs" / "exp")
    for seed, solved in enumerate((30, 45)):
        tree.finished(seed=seed, solved=solved)
    tree.run(seed=2).start().clock(30.0)
    lost = tree.run(seed=3).start().seal(1.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER)
    lost.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    return tree


def report(tree: Tree) -> Path:
    return api.refresh([tree.path]).index


def every_file(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("report/*"))
        if p.is_file() and p.name[0] != "."
    }


def test_files_and_same_bytes(tree: Tree) -> None:
    index = report(tree)
    assert index == tree.path / "report" / "index.html"
    first = every_file(tree.path)
    assert {"report/index.html", "report/summary.json", "report/summary.csv", "report/summary.md"} <= set(first)
    run = tree.runs[0].dir.run_id
    assert {f"{run}/report/summary.json", f"{run}/report/run.md", f"{run}/report/run.html"} <= set(first)
    times = {p: p.stat().st_mtime_ns for p in tree.path.rglob("report/*")}
    report(tree)
    assert every_file(tree.path) == first
    assert times == {p: p.stat().st_mtime_ns for p in tree.path.rglob("report/*")}  # not even written again
    for path in list(tree.path.rglob("report/*")):
        path.unlink()
    report(tree)
    assert every_file(tree.path) == first


def test_another_process_writes_the_same_bytes_without_torch_and_grader(tree: Tree) -> None:
    report(tree)
    first = every_file(tree.path)
    for path in list(tree.path.rglob("report/*")):
        path.unlink()
    code = (
        "import sys; from pathlib import Path; from autorl_hpc.report import report as api;"
        f"api.refresh([Path({str(tree.path)!r})]);"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib') or "
        "m.startswith(('autorl_hpc.grading', 'autorl_hpc.supervise'))]; assert not bad, bad"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parents[2])
    assert every_file(tree.path) == first


class Tags(html.parser.HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_asks_nothing_of_anyone(tree: Tree) -> None:
    page = report(tree).read_text()
    tags = Tags(page).tags
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in tags}
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == sum(tag == "script" for tag, _ in tags) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(str(a["content"]) for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    for tag, attributes in tags:
        assert not {"src", "srcset", "background", "data"} & set(attributes) and not any(
            a.startswith("on") for a in attributes
        )
        if tag == "a" and str(attributes["href"]).startswith("#"):
            assert sum(a.get("id") == str(attributes["href"])[1:] for _, a in tags) == 1
        elif tag == "a":
            target = tree.path / "report" / str(attributes["href"])
            assert target.resolve().is_file()


def hostile(tree: Tree) -> None:
    run = tree.run(agent="hostile").start()
    run.submit(5.0, outcomes(40, range(15)), note=HOSTILE[:400], model_path=HOSTILE[:200], manifest_id="-x<b>")
    run.refuse(6.0, HOSTILE)
    run.seal(exit_code=3, reason=HOSTILE).close(outcomes(100, range(30)), reason=HOSTILE)


def test_hostile_text_stays_text(tree: Tree) -> None:
    hostile(tree)
    report(tree)
    for name, data in every_file(tree.path).items():
        text = data.decode()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]", text), name
        if name.endswith(".html"):
            tags = [tag for tag, _ in Tags(text).tags]
            assert "img" not in tags and tags.count("script") == 1, name
            assert "&lt;script&gt;" in text or "hostile" not in name
        elif name.endswith(".md"):
            assert "<script" not in text and "<img" not in text and "http://" not in text, name
            assert not re.search(r"(?<!\\)\]\(", text), name
        elif name.endswith(".csv"):
            for row in csv.reader(io.StringIO(text)):
                assert not any(cell.startswith(("=", "+", "@", "|")) for cell in row)
    page = next(tree.path.glob("*hostile*/report/run.md")).read_text()
    table = [line for line in page.splitlines() if line.startswith("| 1 |")]
    assert len(table) == 1 and len(re.findall(r"(?<!\\)\|", table[0])) == 11  # no pipe of the agent's makes a column


def test_a_site_works_when_it_is_copied_alone(tree: Tree, tmp_path: Path) -> None:
    """Run pages and traces lay in the runs' folders: on the laptop every link of the index led to nothing."""
    log = b'{"type":"assistant","message":{"content":[{"type":"text","text":"thinking"}]}}\n'
    tree.runs[0].dir.agent_log.write_bytes(log)
    site, laptop = tmp_path / "site", tmp_path / "laptop" / "site"
    command = ["report", str(tree.path), "--out", str(site), "--no-figures"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "whole site, can be copied alone" in done.output and "of which traces" in done.output
    assert not list(tree.path.glob("*/report")), "the runs' own folders are as they were"
    shutil.copytree(site, laptop)
    shutil.rmtree(tree.path.parent)
    shutil.rmtree(site)
    pages = [laptop / "index.html", *laptop.glob("runs/*/*.html")]
    links = {
        (page.parent / unquote(link)).resolve()
        for page in pages
        for link in re.findall(r'href="([^"#]+)', page.read_text())
    }
    assert len(links) > 4 and all(link.is_file() and laptop in link.parents for link in links)
    assert len(list(laptop.glob("runs/*/trace.html"))) == 1 and list(laptop.glob("runs/*/trace/*.js"))


def test_a_light_site_has_no_traces(tree: Tree, tmp_path: Path) -> None:
    tree.runs[0].dir.agent_log.write_bytes(b"words\n")
    for light, traces in ((False, 1), (True, 0), (False, 1)):
        api.refresh([tree.path], tmp_path / "site", api.Options(whole=True, light=light))
        assert len(list(tmp_path.glob("site/runs/*/trace.html"))) == traces
        assert sum("trace.html" in page.read_text() for page in tmp_path.glob("site/runs/*/run.html")) == traces
    assert CliRunner().invoke(app, ["report", str(tree.path), "--light"]).exit_code == Exit.USAGE


def test_csv_numbers_stay_numbers(tree: Tree) -> None:
    tree.finished(seed=7, solved=20)
    report(tree)
    rows = list(csv.DictReader(io.StringIO((tree.path / "report" / "summary.csv").read_text())))
    assert [float(r["improvement"]) for r in rows if r["counted"] == "yes"] == [5, 20, -5]
    assert rows[3]["excluded"] == "infrastructure" and rows[3]["improvement"] == ""


@pytest.mark.parametrize("width", [80, 120])
def test_terminal(tree: Tree, width: int) -> None:
    hostile(tree)
    merged = api.build([tree.path])
    out = io.StringIO()
    print_summary(merged, Console(file=out, width=width, force_terminal=False), Path("report/index.html"))
    text = out.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "+5.0 [" in text and "lost: cluster" in text and "range of two" in text and "\x1b" not in text


def test_a_path_that_can_not_be_written_is_the_users(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/below", "x" * 300, "/proc/report"):
        with pytest.raises(AutorlError, match="can't be written there") as caught:
            api.refresh([tree.path], tmp_path / out)
        assert caught.value.fault is None and caught.value.exit_code == Exit.USAGE
        assert "--out" in (caught.value.next_step or "")

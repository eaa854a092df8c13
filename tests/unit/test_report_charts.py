"""Figures and the merged page of many runs: the same on the page and in files, the same bytes, drawn again only when something changed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import demotree
import pytest

from autorl_hpc.files.layout import share
from autorl_hpc.report import charts, leaderboard, pages
from autorl_hpc.report.charts import Figure, Panel, Series, Spot, write_figures
from autorl_hpc.report.summary import MergedReport

HOSTILE = "$\\frac{1}{0}$ </text><script>alert(1)</script> \"&' _x" + "y" * 80


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MergedReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield demotree.report_on(demotree.demo(tmp_path_factory.mktemp("d") / "demo", seeds=3, tasks=1, agents=2))


def every(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_each_question_has_its_figure_drawn_once(merged: MergedReport, tmp_path: Path) -> None:
    """On the page no colour of white paper is left, no id stands twice within a drawing, what is referred to is there."""
    found = write_figures(merged, tmp_path / "a")
    axes = ("time", "tokens", "submissions", "gpu-hours")
    wanted = ("improvement", *(f"scaling-{a}" for a in axes), "best-of-k")
    assert [figure.name for figure, _ in found[1]] == [f"board01-{one}" for one in wanted]
    page = pages.index_html(merged, {}, found)
    for figure, panels in found[1]:
        assert len(panels) == len(figure.panels)
        for drawing in panels:
            assert drawing in page and not re.search(r": #[0-9a-f]{6}", drawing), figure.name
            ids = re.findall(r' id="([^"]*)"', drawing)
            assert len(ids) == len(set(ids)) and set(re.findall(r'(?:href="|url\()#(\w+)', drawing)) <= set(ids)
    assert '<svg class="chart"' not in pages.index_html(merged, {})

    folder = tmp_path / "a" / "figures"
    first, times = every(folder), {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    write_figures(merged, tmp_path / "a")
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == times
    (folder / "board01-best-of-k-1.svg").write_text("altered")
    (folder / "board01-improvement-1.png").unlink()
    write_figures(merged, tmp_path / "a")
    assert every(folder) == first, "drawn again"

    (tmp_path / "merged.json").write_text(merged.model_dump_json())
    code = (
        "import sys; from pathlib import Path; from autorl_hpc.report.summary import MergedReport;"
        "from autorl_hpc.report.charts import write_figures;"
        "write_figures(MergedReport.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))"
    )
    settings = tmp_path / ".config" / "matplotlib" / "matplotlibrc"
    settings.parent.mkdir(parents=True)
    settings.write_text("font.size: 30\ntext.usetex: True\n")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "MPLBACKEND": "agg"}
    environment.pop("MPLCONFIGDIR", None)
    command = [sys.executable, "-c", code, str(tmp_path / "merged.json"), str(tmp_path / "b")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)
    assert every(tmp_path / "b" / "figures") == first, "another process draws the same bytes"

    fewer = leaderboard.assemble([r for r in merged.runs if r.seed == 0], ["demo"])
    write_figures(fewer, tmp_path / "a")
    assert not (folder / "board01-best-of-k-1.svg").exists() and every(folder) != first


def test_what_is_best_so_far_is_drawn_as_steps() -> None:
    """A value holds until the next place, where it jumps: no piece of the line slopes, and its ends are those of the data."""
    for steps in (True, False):
        none = (None,) * 6
        series = Series("a", 0, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 0.0, 1.0, 1.0, 3.0, 3.0), none, none)
        panel = Panel("lines", "t", (series,), "hours", "points", as_steps=steps)
        with charts.style():
            drawn = charts.drawn(Figure("f", "f", "", (panel,)), panel).element
        (path,) = re.findall(r'd="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--c0\)', drawn)[:1]
        places = [tuple(map(float, place.split()[:2])) for place in re.split("[ML]", path)[1:]]
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(places)) == steps
        assert places[0][0] < places[-1][0] and places[0][1] > places[-1][1]


def test_hostile_labels_stay_text() -> None:
    line = Series(HOSTILE, 0, (0.0, 1.0), (0.0, 2.0), (None, 1.0), (None, 3.0))
    panels = (
        Panel("lines", HOSTILE, (line,), "hours", "points"),
        Panel("forest", HOSTILE, (Spot(HOSTILE, 1.0, 0.0, 2.0, -1),), "points"),
    )
    figure = Figure("hostile", HOSTILE, HOSTILE, panels, ((HOSTILE, 0),))
    with charts.style():
        made = [charts.drawn(figure, panel) for panel in panels]
    for svg, element in ((one.svg.decode(), one.element) for one in made):
        for text in (svg, element.replace("<svg ", '<svg xmlns:xlink="x" ')):
            inside = list(ElementTree.fromstring(text).iter())
            assert not [e for e in inside if e.tag.endswith("script")] and "<script" not in text
            assert not [e for e in inside if any(name.startswith("on") for name in e.attrib)]
        assert HOSTILE in "".join(ElementTree.fromstring(svg).itertext())


def test_colours_of_page_and_files_agree() -> None:
    css = (share("templates") / "report" / "style.css").read_text()
    light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", css[: css.index("@media")]))
    on_page = {c: f"var(--{name})" for name, c in light.items() if c in charts.ON_PAGE and name != "ink"}
    assert on_page == charts.ON_PAGE
    dark = dict(re.findall(r"--(c\d|soft): (#[0-9a-f]{6})", css[css.index("@media") :]))
    assert {*dark, "line"} == {name[6:-1] for name in charts.ON_PAGE.values()}


def test_a_run_in_short_says_the_same_when_it_is_read_back(merged: MergedReport) -> None:
    for run in merged.runs:
        short = run.short()
        again = type(run).model_validate_json(short.model_dump_json())
        assert again == short == again.packed() and again.packed().model_dump_json() == short.model_dump_json()

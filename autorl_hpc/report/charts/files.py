"""The figures as PNG and SVG files: what stands on the page, for a thesis or a talk. The same numbers give the same bytes.

matplotlib draws them; its version stands in figures/index.json, since another one draws other bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.records import canonical_json, readable_json
from autorl_hpc.report.charts.build import figures_of
from autorl_hpc.report.charts.model import Figure
from autorl_hpc.report.pages import MAX_DRAWN_BOARDS
from autorl_hpc.report.summary import MergedReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

FOLDER = "figures"
INDEX = "index.json"
DRAWN_BY = 2
"""Raised when the drawing changes, so that figures of an older version are drawn again."""

MAX_PANELS = 60
"""At about 0.07 s of a core each, both files: a report should not wait for its pictures."""

SUFFIXES = ("png", "svg")
PNG_LEVEL = 2
"""Of zlib: pictures of lines are small at any level."""


def write_figures(merged: MergedReport, out: Path) -> list[Path]:
    """Draws what changed into figures/ of `out`, takes away figures that there is nothing for any more; all paths.

    Raises:
        AutorlError: the folder can't be written.
    """
    folder = out / FOLDER
    known = _known(folder)
    index: dict[str, Any] = {}
    figures = _chosen(merged)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _style() as version:
            for figure in figures:
                of_data = _inputs(figure, version)
                old = known.get(figure.name)
                if isinstance(old, dict) and old.get("inputs") == of_data and _is_whole(folder, figure.name, old):
                    index[figure.name] = old
                    continue
                index[figure.name] = {"inputs": of_data, "title": figure.title, "caption": figure.caption}
                for suffix, data in drawn(figure).items():
                    atomic.write_bytes(folder / f"{figure.name}.{suffix}", data, durable=False)
                    index[figure.name][suffix] = hashlib.sha256(data).hexdigest()
        text = readable_json({"matplotlib": version, "figures": index})
        if _bytes(folder / INDEX) != text:
            atomic.write_bytes(folder / INDEX, text, durable=False)
        for name in set(known) - set(index):
            for suffix in SUFFIXES:
                (folder / f"{_safe(name)}.{suffix}").unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, "writing the figures", error.filename or folder) from error
    return [folder / f"{name}.{suffix}" for name in index for suffix in SUFFIXES]


def expected_files(merged: MergedReport) -> tuple[str, dict[str, bytes]]:
    """matplotlib's version here, and what `write_figures` would write now, by name within figures/."""
    index: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    with _style() as version:
        for figure in _chosen(merged):
            one = {"inputs": _inputs(figure, version), "title": figure.title, "caption": figure.caption}
            for suffix, data in drawn(figure).items():
                files[f"{figure.name}.{suffix}"] = data
                one[suffix] = hashlib.sha256(data).hexdigest()
            index[figure.name] = one
    files[INDEX] = readable_json({"matplotlib": version, "figures": index})
    return version, files


def drawn_with(folder: Path) -> str | None:
    """matplotlib's version that the figures in figures/ of a report were drawn with; None if they don't say."""
    try:
        value = reading.read_json(folder / FOLDER / INDEX)
    except (OSError, ValueError):
        return None
    version = value.get("matplotlib") if isinstance(value, dict) else None
    return version if isinstance(version, str) else None


def _chosen(merged: MergedReport) -> list[Figure]:
    """The figures of the leaderboards on the page, as many whole leaderboards as there is time for, one at least."""
    found: list[Figure] = []
    for number, board in enumerate(merged.boards[:MAX_DRAWN_BOARDS], 1):
        more = figures_of(merged, board, number)
        if found and sum(len(one.panels) for one in (*found, *more)) > MAX_PANELS:
            break
        found += more
    return found


def drawn(figure: Figure) -> dict[str, bytes]:
    """PNG and SVG of one figure. Call it within `_style`."""
    from autorl_hpc.report.charts.drawing import draw

    picture = draw(figure)
    return {suffix: _saved(picture, suffix) for suffix in SUFFIXES}


def _saved(picture: Drawing, suffix: str) -> bytes:
    """By the canvas alone: `savefig` would draw everything once more to settle a layout that is settled."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.BytesIO()
    canvas: Any = FigureCanvasSVG(picture) if suffix == "svg" else FigureCanvasAgg(picture)
    if suffix == "svg":
        canvas.print_svg(out, metadata={"Date": None, "Creator": None})
    else:
        canvas.print_png(out, metadata={"Software": None}, pil_kwargs={"compress_level": PNG_LEVEL})
    return out.getvalue()


def _inputs(figure: Figure, version: str) -> str:
    """sha256 over everything that a figure is drawn from."""
    value = {"figure": json.loads(json.dumps(asdict(figure))), "matplotlib": version, "drawn_by": DRAWN_BY}
    kinds = [type(panel).__name__ for panel in figure.panels]
    return hashlib.sha256(canonical_json({**value, "kinds": kinds})).hexdigest()


def _known(folder: Path) -> dict[str, Any]:
    """What an earlier report drew; empty if there was none, or its index can't be read."""
    try:
        value = reading.read_json(folder / INDEX)
    except (OSError, ValueError):
        return {}
    figures = value.get("figures") if isinstance(value, dict) else None
    return {name: one for name, one in figures.items() if name == _safe(name)} if isinstance(figures, dict) else {}


def _safe(name: str) -> str:
    """A name of ours: nothing that leads out of the folder."""
    return "".join(char for char in name if char.isascii() and (char.isalnum() or char in "-_"))


def _is_whole(folder: Path, name: str, old: dict[str, Any]) -> bool:
    for suffix in SUFFIXES:
        data = _bytes(folder / f"{name}.{suffix}")
        if data is None or hashlib.sha256(data).hexdigest() != old.get(suffix):
            return False
    return True


def _bytes(path: Path) -> bytes | None:
    try:
        return reading.read_bytes(path)
    except (OSError, ValueError):
        return None


@contextmanager
def _style() -> Iterator[str]:
    """matplotlib as it comes, whatever the user's matplotlibrc says; gives its version.

    Its configuration and font cache go to a folder of ours, unless the user names one: a home may be full, or not writable, and
    nothing of ours is to be found there.
    """
    with tempfile.TemporaryDirectory(prefix="autorl-mpl-") as spare:
        if "MPLCONFIGDIR" not in os.environ:
            os.environ["MPLCONFIGDIR"] = spare
        try:
            import matplotlib as mpl

            with mpl.rc_context():
                mpl.rcdefaults()
                settings: Any = mpl.rcParams
                settings.update(_SETTINGS)
                yield str(mpl.__version__)
        finally:
            if os.environ.get("MPLCONFIGDIR") == spare:
                del os.environ["MPLCONFIGDIR"]


_SETTINGS: dict[str, Any] = {
    "backend": "agg",
    "svg.hashsalt": "autorl-hpc",
    "svg.fonttype": "none",  # text stays text: small, searchable, and set in the thesis's own font
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titley": 1.0,  # where it is anyway: left alone, everything above the axes is measured first, twice
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,  # an agent's name may hold dollar signs
    "text.usetex": False,
    "figure.dpi": 150,
}

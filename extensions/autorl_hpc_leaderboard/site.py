"""A static site out of accepted submissions. Pages are made anew from ledgers: no HTML of a bundle is copied, all text is escaped."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import share
from autorl_hpc.report import format as fmt
from autorl_hpc.report.conditions import cell_key
from autorl_hpc.report.report import Options, refresh
from autorl_hpc.report.summary import BoardCell, MergedReport
from autorl_hpc_leaderboard.bulk import read_verdict
from autorl_hpc_leaderboard.submission import FAILS, Bundle, CheckedSubmission, check

NONE = "\N{EN DASH}"
MARK = ".autorl-leaderboard"  # in a folder that holds a site: it may be replaced
KEPT = "report"
"""The one folder of a run that is published: its pages, made here."""


Senders = dict[str, tuple[str, Bundle]]
"""By a run's folder: who sent it, and its bundle."""


@dataclass(frozen=True)
class Standing:
    """One agent of one submitter on one task: a row of the site's table."""

    board: int
    task: str
    agent: str
    rank: str
    gain: str
    n: int
    rescored: str
    conditions: str
    pages: tuple[tuple[str, str], ...]  # label and address of each run's page


def build_site(folders: Sequence[Path], site: Path, url: str, verdicts: Path | None = None) -> list[CheckedSubmission]:
    """Check the submissions in `folders` and write the site; return them with their problems. Only whole ones are on it. A run that
    several sent counts for the first of them.

    Args:
        url: where the site will be, for the feed's links; may be empty.
        verdicts: the maintainer's folder of `rescore --out`.
    """
    if site.exists() and any(site.iterdir()) and not (site / MARK).is_file():
        what = "this folder is not empty, and no site that was built here"
        raise AutorlError(what, where=site, next_step="give a new folder: what is in a site's folder is replaced")
    site.mkdir(parents=True, exist_ok=True)
    (site / MARK).touch()
    runs = site / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    checked: list[CheckedSubmission] = []
    senders: Senders = {}
    names: dict[tuple[str, str], str] = {}  # by submitter and contact
    sent: set[str] = set()  # heads of the runs that are on the site
    with tempfile.TemporaryDirectory(prefix=".work-", dir=site) as work:
        for place, folder in enumerate(folders):
            taken: list[tuple[Bundle, Path]] = []

            def keep(bundle: Bundle, experiment: Path, taken: list[tuple[Bundle, Path]] = taken) -> None:
                shutil.rmtree(experiment / "artifacts", ignore_errors=True)  # weights are not published
                taken.append((bundle, experiment.rename(Path(tempfile.mkdtemp(dir=work)) / experiment.name)))

            one = check(folder, Path(work), keep)
            checked.append(one)
            for bundle, experiment in taken if not one.all_problems() else ():
                assert bundle.manifest is not None and one.file is not None
                if bundle.manifest.head.head in sent:
                    continue
                sent.add(bundle.manifest.head.head)
                bundle.verdict = read_verdict(verdicts, bundle.path) if verdicts is not None else None
                home = runs / f"{place:03d}-{len(senders):04d}" / experiment.name
                home.parent.mkdir()
                experiment.rename(home)
                who = one.file.submitter, one.file.contact
                if who not in names:
                    same = sum(name == who[0] for name, _ in names)  # other people of that name
                    names[who] = f"{who[0]} ({same + 1})" if same else who[0]
                senders[str(home / bundle.manifest.run_id)] = names[who], bundle
    standings: list[Standing] = []
    try:
        if senders:
            by_run = {folder: name for folder, (name, _) in senders.items()}
            options = Options(figures=True, fresh=True, unpacked=True, senders=by_run)
            standings = standings_of(refresh(sorted(runs.iterdir()), site / "report", options).load(), senders, site)
    finally:
        _drop_evidence(runs)
    _write(site, checked, standings, url)
    return checked


def standings_of(merged: MergedReport, senders: Senders, site: Path) -> list[Standing]:
    """Return the rows of the table, best first within a task."""
    rows = []
    for number, board in enumerate(merged.boards, 1):
        c = board.conditions
        gpus = "no GPU" if c.gpus == "0" else f"{c.gpus or '?'} x {c.gpu_model or 'GPU'}"
        limits = f"{fmt.duration(c.budget_s)}, {gpus}, network {c.network}, sandbox {c.sandbox}"
        for place, column in enumerate(board.tasks):
            places = {cell_key(cell): cell.places for cell in merged.groups[column.group].cells}
            for row in board.rows:
                cell = row.cells[place]
                if cell is None:
                    continue
                numbers = places[cell_key(row)]
                folders = [merged.run_folders[one] for one in numbers]
                found = [senders[folder][1].rescored for folder in folders]
                over = cell.improvement
                gain = "none" if over.mean is None else f"{over.mean:+.1f}"
                if over.low is not None:
                    gain += f" [{over.low:+.1f}, {over.high:+.1f}]"
                pages = [str((Path(one) / KEPT / "run.html").relative_to(site)) for one in folders]
                rows.append(
                    Standing(
                        board=number,
                        task=board.column(place),
                        agent=row.label,
                        rank=_rank(cell, next((word for word in found if word.startswith(FAILS)), cell.unranked)),
                        gain=gain,
                        n=over.n,
                        rescored=", ".join(sorted(set(found))),
                        conditions=f"{c.base_model}, {limits}, protocol {c.protocol}",
                        pages=tuple(
                            (f"seed {merged.runs[n].seed}", page) for n, page in zip(numbers, pages, strict=True)
                        ),
                    )
                )
    return rows


def _rank(cell: BoardCell, unranked: str | None) -> str:
    if unranked is not None:
        return f"{NONE} ({unranked})"
    if cell.rank is None:
        return NONE
    return f"#{cell.rank}" if cell.rank == cell.last_rank else f"#{cell.rank}{NONE}{cell.last_rank}"


def _drop_evidence(runs: Path) -> None:
    """Leave nothing of the bundles in the site but the pages that were made here."""
    for experiment in runs.glob("*/*"):
        for path in experiment.iterdir():
            if not (path / KEPT).is_dir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                continue
            for part in path.iterdir():
                if part.name != KEPT:
                    shutil.rmtree(part) if part.is_dir() else part.unlink()


def _write(site: Path, checked: Sequence[CheckedSubmission], standings: Sequence[Standing], url: str) -> None:
    from jinja2 import Environment, FileSystemLoader

    templates = [str(Path(__file__).parent), str(share("templates") / "report")]
    environment = Environment(loader=FileSystemLoader(templates), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    accepted = [one for one in checked if not one.all_problems()]
    history = _history(site, standings, accepted)
    facts: dict[str, Any] = {
        "standings": standings,
        "accepted": sorted(
            accepted, key=lambda one: (one.file.date, one.folder.name) if one.file else (), reverse=True
        ),
        "refused": [one for one in checked if one.all_problems()],
        "history": history,
        "url": url.rstrip("/"),
    }
    for name in ("index.html", "history.html", "feed.xml"):
        text = environment.get_template(f"{name}.j2").render(**facts)
        atomic.write_bytes(site / name, text.encode(), durable=False)
    (site / "badges").mkdir(exist_ok=True)
    for one in standings:
        badge = _badge(one.task, f"{one.rank} {one.gain}")
        atomic.write_bytes(site / _badge_name(one), badge.encode(), durable=False)


def _history(site: Path, standings: Sequence[Standing], accepted: Sequence[CheckedSubmission]) -> list[dict[str, str]]:
    """Return the changes of standings over all builds of this site, newest first; kept in history.json."""
    path = site / "history.json"
    told: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    newest = {(row.get("conditions"), row["task"], row["agent"]): row for row in told}
    date = max((str(one.file.date) for one in accepted if one.file is not None), default="")
    for one in standings:
        now = {"conditions": one.conditions, "task": one.task, "agent": one.agent, "rank": one.rank, "gain": one.gain}
        before = newest.get((one.conditions, one.task, one.agent))
        if before is None or {name: before[name] for name in now} != now:
            told.append({**now, "date": date})
    atomic.write_bytes(path, (json.dumps(told, indent=1, sort_keys=True) + "\n").encode(), durable=False)
    return told[::-1]


def _badge_name(one: Standing) -> str:
    which = hashlib.sha256(f"{one.conditions}\n{one.task}\n{one.agent}".encode()).hexdigest()[:8]
    return f"badges/{_slug(one.task)}-{_slug(one.agent)}-{which}.svg"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"


def _badge(left: str, right: str) -> str:
    """Return a small SVG with two texts side by side."""
    widths = [7 * len(text) + 12 for text in (left, right)]
    a, b = (html.escape(text) for text in (left, right))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" aria-label="{a}: {b}">'
        f'<rect width="{widths[0]}" height="20" fill="#444"/><rect x="{widths[0]}" width="{widths[1]}" height="20" fill="#0072b2"/>'
        f'<g fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11">'
        f'<text x="6" y="14">{a}</text><text x="{widths[0] + 6}" y="14">{b}</text></g></svg>\n'
    )

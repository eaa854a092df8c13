"""What the contract tests share: stored experiments, the command line as a user calls it, and comparison with golden files.

Nothing here, and no test beside it, imports the package: the contract is what commands print and which files they write.
"""

from __future__ import annotations

import csv
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
GOLDEN = HERE / "golden"
LIMIT_S = 600
MADE_AT = "/srv/autorl"
"""The root folder in which the stored experiments were made; no such folder is needed to read them."""

OF_ROUTES = {
    *("route", "planned", "executed", "planned_by", "executed_by", "disputed", "mode_kept", "turned", "modes_kept"),
    *("modes_broken", "route_planned", "route_executed", "settings", "routes"),
}
"""JSON keys and CSV columns that hold an agent's route. They have golden files of their own."""

POINTS = 0.05
P_VALUE = 0.005
OF_A_STATISTIC = re.compile(r"low|high|best_of|bootstrap|interval|visible_gain|luck|noise|optimism|lc_|se$|gap")
OF_A_TEST = re.compile(r"(^|_)p($|_)|p_value|p_holm")
"""Names of figures that another statistics library may compute a little differently."""

FOOTER = re.compile(r"(autorl-hpc) [\d.]+(?= · the same ledgers)")
"""A page's last line names the version that wrote it."""
NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d+\.\d+(?:e[-+]?\d+)?(?![\w.]*[\w])")


@dataclass
class Place:
    """A folder of a test with a root, an empty home and the commands as a user calls them."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `autorl-hpc` in this folder and return how it ended. No Slurm of this machine is asked."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(warm.AT_IMPORT)}
        (self.path / "home").mkdir(exist_ok=True)
        full = {
            **kept,
            "PATH": os.pathsep.join([str(HERE / "site"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            **{"HOME": str(self.path / "home"), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
            **{"AUTORL_ROOT": str(self.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TZ": "UTC"},
            **self.env,
            **(env or {}),
        }
        return warm.run(["-m", "autorl_hpc", *map(str, arguments)], full, self.path, LIMIT_S)

    def facts(self, *arguments: str | Path, code: int = 0) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return json.loads(done.stdout)

    def unpack(self, name: str) -> Path:
        with tarfile.open(HERE / "experiments" / f"{name}.tar.xz") as packed:
            packed.extractall(self.path)
        return self.path / "runs" / name

    def mask(self, text: str) -> str:
        """Return the text without what differs between machines and versions: folders, the Python, the version, times of now."""
        text = re.sub(re.escape(str(Path(sys.executable).parent)) + r"/python[\d.]*", "$PYTHON", text)
        for folder, name in {str(self.path): "$ROOT", str(REPO): "$REPO"}.items():
            text = text.replace(folder, name)
        text = re.sub(r'("?(?:tool_version|written_at|made_at)"?: )"[^"]*"', r'\1"$MASKED"', text)
        return text


@dataclass
class Stored:
    """A stored experiment after all commands that only read, and after `report`."""

    name: str
    place: Place
    folder: Path
    before: list[str]
    status: Any
    verdicts: Any
    reported: Any


def golden(
    name: str, value: Any, *, write: bool, compare: Callable[[Any, Any, str], Iterator[str]] | None = None
) -> None:
    """Hold a value against its golden file, `.json` or text; or write the file.

    Raises:
        AssertionError: they differ; it names each place.
    """
    path = GOLDEN / name
    text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    before = path.read_text(encoding="utf-8")
    if isinstance(value, str):
        found = list(text_differences(*(FOOTER.sub(r"\1", each) for each in (before, value))))
    else:
        found = list((compare or differences)(json.loads(before), json.loads(text), ""))
    assert not found, f"{len(found)} differences from {path.relative_to(REPO)}:\n" + "\n".join(found[:40])


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """Yield each place where two JSON values differ; figures of statistics may differ by their tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in new:
                yield f"{where}.{key} is gone; it was {json.dumps(old[key])[:100]}"
            elif key not in old:
                yield f"{where}.{key} is new: {json.dumps(new[key])[:100]}"
            else:
                yield from differences(old[key], new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where}: {len(old)} entries became {len(new)}"
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(old, float) and isinstance(new, int | float) and not isinstance(new, bool):
        name = where.rpartition(".")[2]
        slack = (
            P_VALUE if OF_A_TEST.search(name) else POINTS if OF_A_STATISTIC.search(name) else 1e-6 * max(1, abs(old))
        )
        if abs(old - new) > slack:
            yield f"{where}: {old} became {new}"
    elif old != new or isinstance(old, bool) is not isinstance(new, bool):
        yield f"{where}: {json.dumps(old)[:200]} became {json.dumps(new)[:200]}"


def text_differences(old: str, new: str) -> Iterator[str]:
    """Yield lines that differ. A printed decimal may differ by the tolerance and one unit of its last digit."""
    before, after = old.splitlines(), new.splitlines()
    if len(before) != len(after):
        yield f"{len(before)} lines became {len(after)}"
        yield from (f"gone: {line}" for line in before if line not in set(after))
        yield from (f"new: {line}" for line in after if line not in set(before))
        return
    for number, (one, other) in enumerate(zip(before, after, strict=True), 1):
        if one != other and not _same_line(one, other):
            yield f"line {number}: {one}\n      became: {other}"


def _same_line(one: str, other: str) -> bool:
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    for old, new in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
        unit = 10.0 ** -len(old.partition(".")[2].partition("e")[0])
        if abs(float(old.replace("\u2212", "-")) - float(new.replace("\u2212", "-"))) > POINTS + 1.01 * unit:
            return False
    return True


def without_routes(value: Any, routes: dict[str, Any], where: str = "") -> Any:
    """Return a JSON value without what it says of routes, and put that into `routes` by its place."""
    if isinstance(value, dict):
        routes.update({f"{where}.{key}": each for key, each in value.items() if key in OF_ROUTES})
        rest = {key: each for key, each in value.items() if key not in OF_ROUTES}
        return {key: without_routes(each, routes, f"{where}.{key}") for key, each in rest.items()}
    if isinstance(value, list):
        return [without_routes(each, routes, f"{where}[{index}]") for index, each in enumerate(value)]
    return value


def rows(path: Path) -> list[dict[str, Any]]:

    def read(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    with open(path, encoding="utf-8", newline="") as file:
        return [{key: read(text) for key, text in row.items()} for row in csv.DictReader(file)]


class _Page(html.parser.HTMLParser):
    """Collects a page's visible text: a line a block, a line a table row with `|` between cells."""

    BLOCKS = frozenset(
        "p h1 h2 h3 h4 li tr caption summary figcaption dt dd div section table pre title".split()  # noqa: SIM905
    )
    UNSEEN = frozenset({"script", "style", "svg"})

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unseen += tag in self.UNSEEN
        if tag in self.BLOCKS:
            self.lines.append("# " if tag in ("h1", "h2", "h3", "h4") else "")
        elif tag in ("td", "th"):
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        self.unseen -= tag in self.UNSEEN
        if tag in self.BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self.unseen:
            self.lines[-1] += data


def visible(page: str) -> list[str]:
    """Return the lines that a reader of an HTML page sees, white space folded; figures are left out."""
    parser = _Page()
    parser.feed(page)
    return [line for line in (" ".join(line.split()) for line in parser.lines) if line and line.strip("| ")]


def split_text(lines: list[str]) -> tuple[str, str]:
    """Return the text without what it says of routes, and that alone: columns of tables by their header, other lines by word."""
    rest, routes, columns = list[str](), list[str](), list[int]()
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        of_route = [
            number for number, cell in enumerate(cells) if re.search(r"\broutes?\b|\bplanned\b|\bexecuted\b", cell)
        ]
        if " | " not in line:
            columns = []
            (routes if of_route else rest).append(line)
        else:
            if of_route and len(cells) > 3:
                columns = of_route  # a header
            if of_route and len(cells) <= 3:
                routes.append(line)
                continue
            routes += [cells[number] for number in columns if number < len(cells)]
            rest.append(" | ".join(cell for number, cell in enumerate(cells) if number not in columns))
    return "\n".join(rest) + "\n", "\n".join(routes) + "\n"


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def alter(path: Path, data: bytes) -> None:
    """Write a file anew, also a read-only one, in place of the old one."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def with_code_of(run: Path, old: str, new: str) -> None:
    """Let a stored run name other frozen code, and link its chain anew from there. It is what makes it resumable by this version."""
    alter(run / "run.json", (run / "run.json").read_bytes().replace(old.encode(), new.encode()))
    before = hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
    lines = []
    for path in sorted((run / "ledger").glob("0*.json")):
        entry = {**json.loads(path.read_bytes()), "prev": before}
        lines.append(json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
        alter(path, lines[-1])
        before = hashlib.sha256(lines[-1]).hexdigest()
    if (run / "ledger.jsonl").exists():
        alter(run / "ledger.jsonl", b"".join(lines))


def damage(experiment: Path) -> None:
    """Damage a copy of the experiment `finished`: each run in another way, the rest of them not at all."""

    def run(start: str) -> Path:
        (found,) = experiment.glob(f"{start}-*")
        return found

    def entry(of: str, kind: str) -> Path:
        found = sorted((run(of) / "ledger").glob("0*.json"))
        return next(path for path in found if json.loads(path.read_bytes())["kind"] == kind)

    score = entry("arithmetic-sft-tiny-free-s0", "score")
    alter(score, re.sub(rb'"score":[0-9.]+', b'"score":99.0', score.read_bytes()))
    next((run("arithmetic-sft-tiny-free-s1") / "items").iterdir()).unlink()
    entry("arithmetic-stumbler-tiny-free-s0", "fingerprint").unlink()
    closed = entry("arithmetic-stumbler-tiny-free-s1", "closed")
    alter(closed, closed.read_bytes()[:100])
    last = entry("arithmetic-copycat-tiny-free-s0", "closed")
    number = int(last.stem) + 1
    sealed = json.loads(entry("arithmetic-copycat-tiny-free-s0", "sealed").read_bytes())
    foreign = {**sealed, "seq": number, "prev": hashlib.sha256(last.read_bytes()).hexdigest()}
    added = json.dumps(foreign, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    alter(last.with_name(f"{number:06d}.json"), added)
    record = run("arithmetic-null-tiny-free-s0") / "run.json"
    alter(record, record.read_bytes().replace(b'"seed": 0', b'"seed": 7'))
    entry("arithmetic-null-tiny-free-s1", "closed").unlink()
    alter(run("arithmetic-stumbler-tiny-free-s2") / "ledger" / "000003.json.bak", b"{}\n")
    sketch = next((run("arithmetic-sft-tiny-free-s2") / "sketches").iterdir())
    alter(sketch, sketch.read_bytes()[:-4] + b"\0\0\0\0")
    shutil.copytree(run("arithmetic-null-tiny-free-s2"), experiment / "arithmetic-null-tiny-free-s9-6c607d15")
    given = experiment / "experiment.json"
    alter(given, given.read_bytes().replace(b'"wall_clock_s": 1200.0', b'"wall_clock_s": 1300.0'))

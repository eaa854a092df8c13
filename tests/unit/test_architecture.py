"""The arrows between rooms run one way, nothing heavy is imported at module level, files stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "autorl_hpc"

LEVELS = [
    {"errors", "states", "records"},
    {"files"},
    {"agents", "tasks", "scoring", "rollouts", "cluster", "sandbox", "recorder", "drivers", "gateway"},
    {"launch", "supervise", "grading", "report", "stage", "doctor"},
    {"quickstart", "evidence"},
    {"cli", "cli_jobs", "cli_evidence", "entry", "__main__"},
]
"""Design section 4: cli -> launch | supervise | grading | report | stage -> rollouts, scoring, tasks -> files -> records,
states. Rooms of the fourth level don't know each other."""

LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
MAX_LINES = 450
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "scipy",
    "matplotlib",
    "vllm",
    "submitit",
    "numpy",
    "sklearn",
    "textworld",
    "aiohttp",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "autorl_hpc" and len(parts) > 1 and parts[1] in LEVEL:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_run_one_way(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    assert own in LEVEL, f"{own} is a new room: give it a level"
    for other in imported_rooms(path) - {own}:
        assert LEVEL[other] <= LEVEL[own], f"{path} imports {other}, which stands above it"
        if LEVEL[own] == 3:
            assert LEVEL[other] < 3, f"{path}: rooms {own} and {other} must not know each other"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_module_level(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in names:
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name} at module level"


def test_the_cli_answers_without_heavy_imports() -> None:
    script = "import sys, autorl_hpc.cli; print([m for m in sys.modules if m.split('.')[0] in %r])" % (
        HEAVY | {"pydantic"}
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_runs_without_torch(tmp_path: Path) -> None:
    script = "import sys; import autorl_hpc.report.api, autorl_hpc.report.terminal; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_files_stay_readable() -> None:
    tracked = [*modules(), *(REPO / "tasks").rglob("*.py"), *(REPO / "templates").rglob("*.py")]
    long = {
        str(p.relative_to(REPO)): n
        for p in tracked
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_in_the_docs_exist() -> None:
    from typer.main import get_command

    from autorl_hpc.cli import app

    known = set(getattr(get_command(app), "commands"))  # noqa: B009  a click.Group
    for page in [REPO / "README.md", *(REPO / "docs").glob("*.md")]:
        for command in re.findall(r"autorl-hpc ([a-z]+)(?=[ `\n])", page.read_text(encoding="utf-8")):
            assert command in known | {"and", "is"}, f"{page.name} names `autorl-hpc {command}`"


def test_no_path_of_one_machine_is_committed() -> None:
    names = subprocess.run(
        ["git", "-C", str(REPO), "ls-files"], capture_output=True, text=True, check=False
    ).stdout.split()
    for name in names:
        path = REPO / name
        if path.suffix in (".safetensors", ".png") or not path.is_file():
            continue
        found = re.search(r"(^|[^A-Za-z0-9_.~])/(work|root|farm)/", path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{name}: {found.group() if found else ''}"

"""Fixtures (a staged root, real processes), the environment that tests run in, and the options of `bin/test`.

Tiers (`--tier`): `quick` is tests/unit without the tests marked `slow`; `default` is everything not marked `soak`; `all` is all.
Skips (`--require`): every skip names a need of tests/needs.py; one that names none, or a required one, fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Tests in the background of a shell have SIGINT ignored, and the processes that they interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

import needs  # noqa: E402
from helpers import Cluster  # noqa: E402
from realdata import real_data  # noqa: E402

FOLDERS = ("slurm", "cheaters", "integration", "hostile", "gpu", "contract", "mutants", "observed_runs", "unit")
"""The order of tests: those that wait longest begin first, and the many short ones fill the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autorl-hpc")
    group.addoption("--tier", choices=("quick", "default", "all"), default="all", help="which tests (default: all)")
    group.addoption(
        "--require", default="", metavar="NEEDS", help=f"needs that must not skip, of: {', '.join(needs.NEEDS)}"
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = required(config) - set(needs.NEEDS)
    if unknown:
        raise pytest.UsageError(f"--require: unknown: {', '.join(sorted(unknown))}; known: {', '.join(needs.NEEDS)}")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Teller(config), "autorl-teller")


def required(config: pytest.Config) -> set[str]:
    """Return the needs whose absence is a failure."""
    return set(filter(None, config.getoption("--require").split(",")))


def folder_of(item: pytest.Item) -> str:
    """Return the folder below tests/ that the test is in."""
    return item.path.relative_to(REPO / "tests").parts[0]


def in_tier(item: pytest.Item, tier: str) -> bool:
    """Tell whether a tier holds the test."""
    if tier == "all":
        return True
    soak = item.get_closest_marker("soak") is not None
    return not soak and (tier == "default" or (folder_of(item) == "unit" and item.get_closest_marker("slow") is None))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        (kept if in_tier(item, config.getoption("--tier")) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    count = {"left_out": len(dropped)}
    getattr(config, "workeroutput", config.stash.setdefault(LEFT_OUT, {})).update(count)
    items[:] = sorted(kept, key=lambda item: (FOLDERS.index(folder_of(item)), item.get_closest_marker("slow") is None))
    for item in items:
        if folder_of(item) == "slurm":  # those of the default tier share one sandbox; soak tests have one for each file
            soak = item.get_closest_marker("soak") is not None
            item.add_marker(pytest.mark.xdist_group(f"slurm-{item.path.stem}" if soak else "slurm"))


LEFT_OUT = pytest.StashKey[dict[str, int]]()


def forbid_skip(report: Any, config: pytest.Config) -> Any:
    """Turn a skip into a failure where `--require` forbids it."""
    if required(config) and report.skipped and isinstance(report.longrepr, tuple):
        path, line, text = report.longrepr
        need = needs.need_of(text)
        if need is None or need in required(config):
            why = "names no need of tests/needs.py" if need is None else f"{need} is required"
            report.outcome, report.longrepr = "failed", f"{path}:{line}: {text}\n--require: this skip fails: {why}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    return forbid_skip((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    return forbid_skip((yield), collector.config)


class Teller:
    """Print failures as they come, and at the end what did not run here and why."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_sep("_", f"{report.nodeid} ({report.when}, after {report.duration:.1f} s)", red=True)
            terminal.write_line(report.longreprtext)
            for name, text in report.sections:
                terminal.write_line(f"-- {name}\n{text[-4000:]}")

    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("left_out", 0))

    def pytest_sessionfinish(self) -> None:
        self.config.option.tbstyle = "no"  # they have been printed

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped: defaultdict[str, list[str]] = defaultdict(list)
        for report in terminalreporter.stats.get("skipped", []):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            skipped[needs.need_of(text) or "a need not named"].append(text.removeprefix("Skipped: "))
        left_out = self.left_out or self.config.stash.get(LEFT_OUT, {}).get("left_out", 0)
        if skipped or left_out:
            terminalreporter.section("what did not run here")
        for _, texts in sorted(skipped.items()):
            reasons = sorted(set(texts))
            more = f" (and {len(reasons) - 3} more reasons)" if len(reasons) > 3 else ""
            terminalreporter.write_line(f"{len(texts):5d}  {'; '.join(reasons[:3])}{more}")
        if left_out:
            terminalreporter.write_line(f"{left_out:5d}  tests of a longer tier: bin/test --all runs everything")


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data; the test skips by name without them."""
    found = real_data()
    if found is None:
        needs.skip("data", "the real data are not here: set AUTORL_TEST_DATA to a folder with gsm8k/")
    return found


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the arithmetic task and the tiny model staged; read-only for tests."""
    root = tmp_path_factory.mktemp("staged")
    subprocess.run(
        [sys.executable, "-m", "autorl_hpc", "stage", "arithmetic", "tiny", "--root", str(root)],
        check=True,
        capture_output=True,
    )
    return root


@pytest.fixture
def cluster(staged: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A root of the test's own with everything staged, and a way to start and kill the suite's processes."""
    made = Cluster(staged, tmp_path)
    try:
        yield made
    finally:
        made.end()

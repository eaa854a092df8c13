"""Fixtures: a staged root, real processes, and the environment that tests run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Tests in the background of a shell have SIGINT ignored, and the processes that they interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

from helpers import Cluster  # noqa: E402
from realdata import real_data  # noqa: E402


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data; the test skips by name without them."""
    found = real_data()
    if found is None:
        pytest.skip("the real data are not here: set AUTORL_TEST_DATA to a folder with gsm8k/")
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

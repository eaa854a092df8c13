"""Sources for staging: addresses, the Hugging Face Hub and its token; progress, disk space, work folders, lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.atomic import TEMPORARY_PREFIX
from autorl_hpc.states import Fault

Say = Callable[[str], None]
Shown = Callable[[int, int | None], None]  # called with the number of bytes done, and of the total if known
LINE_EVERY_S = 15.0  # between two log lines: often enough to show that it goes on, rare enough for a download of hours


def in_words(size_bytes: float) -> str:
    """Format bytes, such as `4.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def progress(name: str, say: Say) -> Shown:
    """Return a function that says now and then how far something is."""
    last = time.monotonic()

    def shown(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            say(f"{name}: {in_words(done)}" + (f" of {in_words(total)}" if total else ""))

    return shown


# --- disk space, checked before anything is written

RESERVE_BYTES = 1024 * 1024  # for manifests and folders besides the files


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Check that `what` fits on the disk of a folder, which need not exist yet; quotas are not seen. Raises AutorlError: it doesn't."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    missing = needed_bytes + RESERVE_BYTES - free
    if missing > 0:
        what = f"{what} needs {in_words(needed_bytes)}, and {in_words(free)} are free: {in_words(missing)} are missing"
        advice = "free some space, or point --root at another file system, then run the same command again"
        raise AutorlError(what, where=place, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


# --- work folders, and the lock that keeps two stagings apart


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Lock the file `path`, which stays. Some file systems grant a lock to everybody, so the caller must check its result. Raises
    AutorlError: another process has the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what, advice = f"another process is {doing}", "wait for its end, then run the same command again"
            raise AutorlError(what, where=path, next_step=advice, exit_code=Exit.ENVIRONMENT) from None
        except OSError:
            pass  # no locks on this file system
        yield


@contextmanager
def work_folder(parent: Path, purpose: str, *, mode: int = 0o755) -> Iterator[Path]:
    """Yield an empty folder in `parent`, removed at the end, like folders of killed processes of this host."""
    parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname().partition(".")[0]
    stem = f"{TEMPORARY_PREFIX}{purpose}-{host}-"
    for name in os.listdir(parent):
        pid = name.removeprefix(stem)
        if name.startswith(stem) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_folder(parent / name)
    work = parent / f"{stem}{os.getpid()}"
    remove_folder(work)
    work.mkdir(mode=mode)
    try:
        yield work
    finally:
        remove_folder(work)


def remove_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        return
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


# --- pip


def pip(
    arguments: list[str], what: str, next_step: str, where: Path | None = None, fault: Fault | None = Fault.CLUSTER
) -> None:
    """Run pip of this Python. Raises AutorlError if it failed; `what` with pip's own words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        words = f"{what}: {last_words(done.stdout + done.stderr)}"
        code = Exit.ENVIRONMENT if fault else Exit.USAGE
        raise AutorlError(words, where=where, fault=fault, next_step=next_step, exit_code=code)


def last_words(output: str) -> str:
    """Return the error lines of a program's output, without passwords in index addresses."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return re.sub(r"//[^/@\s]+@", "//", " ".join(errors[:2] or lines[-1:]))[:500]


HUB = "https://huggingface.co"
HUB_VARIABLE = "HF_ENDPOINT"
TOKEN_PATH_VARIABLE = "HF_TOKEN_PATH"
HUB_FORM = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@(?P<revision>[\w./-]+?)/(?P<path>.+)"
)
REVISION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # a commit, tag or branch; no branch with a slash
GITHUB_PAGE = re.compile(r"https://github\.com/(?P<repo>[^/]+/[^/]+)/blob/(?P<rest>.+)")
GITHUB_FILE = re.compile(r"https://github\.com/[^/]+/[^/]+/(raw|releases/download|archive)/.+")


@dataclass(frozen=True)
class HttpSource:
    """An HTTP request's target; only the Hub gets the token."""

    url: str
    hub: bool = False

    @property
    def shown(self) -> str:
        """The URL for messages, without the query, which may contain a key."""
        return self.url.partition("?")[0]


def address_of(text: str) -> HttpSource | None:
    """Return the address that `text` means (`hf://[datasets/]ORG/NAME@REVISION/PATH`: of the Hub; a GitHub page: its file), or None:
    it is only for people. Raises AutorlError: it looks like one but is invalid."""
    if text.startswith("hf://"):
        form = HUB_FORM.fullmatch(text)
        if form is None or not re.fullmatch(REVISION_PATTERN, form["revision"]) or ".." in form["path"].split("/"):
            advice = "write hf://ORG/NAME@REVISION/PATH, or hf://datasets/ORG/NAME@REVISION/PATH"
            raise AutorlError(f"{text[:200]} is no address of a file on the Hub", next_step=advice)
        return hub_file(f"{form['kind'] or ''}{form['repo']}", form["revision"], form["path"])
    if not re.fullmatch(r"https?://[!-~]+", text):
        return None
    parts = urlsplit(text)
    if page := GITHUB_PAGE.fullmatch(text.partition("#")[0]):
        return HttpSource(f"https://raw.githubusercontent.com/{page['repo']}/{page['rest']}")
    if parts.hostname == "github.com" and not GITHUB_FILE.fullmatch(text):
        return None  # a page about a repository or a folder
    if not parts.hostname or parts.username is not None or parts.password is not None:
        what = f"{parts.hostname or 'an address without a host'}: no address to fetch from"
        raise AutorlError(what, next_step="give https://HOST/PATH without user and password")
    base = urlsplit(hub_url())
    return HttpSource(text, hub=(parts.scheme, parts.netloc) == (base.scheme, base.netloc))


def hub_url() -> str:
    """Return the Hub's URL, or the mirror in $HF_ENDPOINT. Raises AutorlError if the variable is not an address."""
    value = os.environ.get(HUB_VARIABLE, "").rstrip("/") or HUB
    parts = urlsplit(value)
    if not re.fullmatch(r"https?://[!-~]+", value) or not parts.hostname or "@" in parts.netloc:
        raise AutorlError(f"${HUB_VARIABLE} is no address", next_step=f"set it to a mirror such as {HUB}, or unset it")
    return value


def hub_file(repo: str, revision: str, path: str) -> HttpSource:
    """Return the address of a file on the Hub; `repo` of a data set begins with `datasets/`."""
    return HttpSource(f"{hub_url()}/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}", hub=True)


def hub_token() -> str | None:
    """Read the user's Hub token from the file in $HF_TOKEN_PATH, or where `hf auth login` puts it; never from a variable or an
    argument, which others can see. Raises AutorlError: the file can't be read, or holds no token."""
    named = os.environ.get(TOKEN_PATH_VARIABLE)
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    path = Path(named).expanduser() if named else home / "token"
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        if not named:
            return None
        what, advice = f"the file of the Hub's token can't be read: {error.strerror}", f"correct ${TOKEN_PATH_VARIABLE}"
        raise AutorlError(what, where=path, next_step=advice, exit_code=Exit.ENVIRONMENT) from None
    if not re.fullmatch(rb"[!-~]{1,4096}", token):
        what = "the file of the Hub's token must hold the token alone, in one line"
        raise AutorlError(what, where=path, next_step="write it anew: hf auth login")
    return token.decode("ascii")

"""Stage a task: fetch or check its source files, run its prepare.py (or cut an rl-smith folder), and check every hash.

Training files go to store/, held-out items to vault/ with mode 0700. A folder gets its manifest last and its name by
rename, so a killed staging leaves nothing that looks staged.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.checkpoint import file_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME, describe_files, write_manifest
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import Derived, SourceFile
from autorl_hpc.stage.download import PATIENCE, NoNetwork, Patience, Pin, fetch
from autorl_hpc.stage.sources import HttpSource, Say, address_of, remove_folder
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.heldout import (
    StagedTask,
    check_items,
    recipe_files,
    train_names,
    vault_names,
    vault_pins,
    verify_staged_task,
)
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.smith import DATA, DOWNLOAD, SHARES, pinned, write_splits

# --- derived source files: made from a download, and pinned by their content
#
# `first_rows_jsonl_gz`: the first rows of a JSON list, one per line as Python's json writes them (not escaped), gzipped. The pin
# covers the text, because zlib versions compress differently; so a file whose text matches is accepted too.

MAX_RAW_BYTES: Final = 1024 * 1024 * 1024
MAX_TEXT_BYTES: Final = 256 * 1024 * 1024
"""Limit for the unpacked text, because a small file can unpack to any size."""


def is_pinned(path: Path, pinned: SourceFile) -> str | None:
    """Return None if the file matches the task's pin, else its sha256."""
    digest = file_sha256(path)
    if digest == pinned.sha256 or (pinned.derived is not None and _text_sha256(path) == pinned.derived.sha256):
        return None
    return digest


def make_derived(raw: Path, target: Path, derived: Derived) -> None:
    """Make the derived file from the download.

    Raises:
        AutorlError: the download is not a suitable list, or the result does not match the pin.
    """
    try:
        rows = json.loads(reading.read_bytes(raw, max_bytes=MAX_RAW_BYTES))
    except (ValueError, RecursionError) as error:
        raise _refused(target, derived, f"is no JSON: {str(error)[:200]}") from None
    if not isinstance(rows, list) or len(rows) < derived.n:
        held = f"{len(rows)} rows" if isinstance(rows, list) else "no list"
        raise _refused(target, derived, f"holds {held}, needed are {derived.n} rows")
    # JSON may contain half of a surrogate pair, which UTF-8 can't encode.
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[: derived.n]).encode("utf-8", "replace")
    made = hashlib.sha256(text).hexdigest()
    if made != derived.sha256:
        raise _refused(target, derived, f"gives a text with sha256 {made}, the task pins {derived.sha256}")
    atomic.write_bytes(target, gzip.compress(text, mtime=0))


def _text_sha256(path: Path) -> str | None:
    unpack = zlib.decompressobj(wbits=31)
    try:
        text = unpack.decompress(reading.read_bytes(path, max_bytes=MAX_TEXT_BYTES), MAX_TEXT_BYTES)
    except (zlib.error, ValueError):
        return None
    # not truncated, not too long, no data after the end
    return hashlib.sha256(text).hexdigest() if unpack.eof and not unpack.unused_data else None


def _refused(target: Path, derived: Derived, words: str) -> AutorlError:
    return AutorlError(
        f"{target.name} can't be made: what is at {derived.url.partition('?')[0]} {words}",
        where=target,
        next_step="get the file from somebody who has it, and stage with --from DIR",
        exit_code=Exit.FAILED,
    )


# --- fetching a task's source files, each checked against its pin


@dataclass(frozen=True)
class Wanted:
    """A source file and its address; without an address only a person can get it."""

    pinned: SourceFile
    address: HttpSource | None


def wanted_sources(task: Task) -> list[Wanted]:
    """Return the task's source files.

    Raises:
        AutorlError: an address in task.yaml is invalid.
    """
    found = []
    for source in task.file.sources:
        try:
            url = source.derived.url if source.derived else source.url
            found.append(Wanted(source, address_of(url) if url else None))
        except AutorlError as error:
            raise AutorlError(
                f"field `sources`, {source.file}: {error.what}",
                where=task.folder / "task.yaml",
                next_step=error.next_step,
            ) from None
    return found


def fetch_sources(
    root: Root, task: Task, wanted: list[Wanted], *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> Path:
    """Download all source files that have an address, and return their folder.

    Raises:
        NoNetwork: with the list of files to fetch elsewhere.
        AutorlError: a download failed, or a file does not match its pin.
    """
    folder = sources_folder(root, task.name)
    for place in (root.vault, folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(place, 0o700)
    for one in wanted:
        target = folder / one.pinned.file
        if one.address is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        say(f"{task.name}: {one.pinned.file} from {one.address.shown}")
        try:
            if one.pinned.derived is None:
                fetch(one.address, target, Pin(sha256=one.pinned.sha256), say=say, patience=patience)
            elif not target.is_file() or is_pinned(target, one.pinned) is not None:
                raw = target.with_name(f"{target.name}.made-of")
                fetch(one.address, raw, say=say, patience=patience)
                try:
                    make_derived(raw, target, one.pinned.derived)
                finally:
                    raw.unlink()
        except NoNetwork as error:
            raise NoNetwork(
                error.what,
                where=error.where,
                fault=error.fault,
                next_step=_ways_out(task, wanted),
                exit_code=Exit.ENVIRONMENT,
            ) from None
    return folder


def sources_folder(root: Root, name: str) -> Path:
    """Return the folder for downloads until they are staged; in the vault, because they contain the held-out items."""
    return root.vault / ".sources" / name


def remove_sources(root: Root, name: str) -> None:
    """Delete the downloads."""
    shutil.rmtree(sources_folder(root, name), ignore_errors=True)


def _ways_out(task: Task, wanted: list[Wanted]) -> str:
    lines = [
        f"either run it where there is network, most often on the login node: autorl-hpc stage {task.name}",
        f"         or lay these files into a folder DIR and run: autorl-hpc stage {task.name} --from DIR",
    ]
    for one in wanted:
        place = one.address.shown if one.address else one.pinned.url or task.file.source
        if one.pinned.derived is not None:
            place = f"the first {one.pinned.derived.n} rows of {place}"
        optional = "  (optional)" if one.pinned.optional else ""
        lines.append(f"           {one.pinned.file}  {place}  sha256 {one.pinned.sha256}{optional}")
    lines.append(
        f"         or make a bundle elsewhere: autorl-hpc stage {task.name} --bundle FILE.tar.gz; here: --from FILE.tar.gz"
    )
    return "\n".join(lines)


# --- rl-smith folders: rows are cut into three splits, and the result is pinned

MAX_SHOWN_CHARS = 500


def prepare_smith(task: Task, source: Path | None, work: Path, say: Say) -> Task:
    """Write training rows and held-out items below `work`; return the task with their pins.

    Args:
        source: a folder with train.jsonl, used instead of the task's own rows.

    Raises:
        AutorlError: rows are missing, too few or unreadable, or download_data.py failed.
    """
    assert task.smith is not None
    data = task.folder / DATA if source is None else source / Path(DATA).name
    if source is None and not data.is_file():
        data = _downloaded(task, work / "download", say)
    if not data.is_file():
        raise AutorlError(
            f"{data.name} is missing",
            where=data,
            next_step=f"the folder given by --from holds {data.name}; without --from {DATA} or {DOWNLOAD} of the task is used",
        )
    write_splits(task.smith, data, task.name, work)
    say(
        f"{task.name}: rows of {data.name} cut into " + ", ".join(f"{name} {share} %" for name, share in SHARES.items())
    )
    return replace(task, file=pinned(task.file, file_sha256(data), work))


def _downloaded(task: Task, copy: Path, say: Say) -> Path:
    """Run the task's download_data.py in a private copy of its folder, so that future held-out rows are nowhere else. Return
    the path of data/train.jsonl."""
    script = task.folder / DOWNLOAD
    if not script.is_file():
        raise AutorlError(
            f"task {task.name} has neither {DATA} nor {DOWNLOAD}", where=task.folder, next_step="put the rows there"
        )
    say(f"{task.name}: running {script}: the task's own code, with your rights and network")
    for name in walk_files(task.folder):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(task.folder / name, copy / name)
    done = subprocess.run(
        [sys.executable, DOWNLOAD], cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    made = copy / DATA
    if done.returncode or not made.is_file():
        said = (done.stderr or done.stdout).strip()[-MAX_SHOWN_CHARS:]
        failed = f"failed with exit code {done.returncode}" if done.returncode else f"made no {DATA}"
        raise AutorlError(
            f"{DOWNLOAD} of task {task.name} {failed}" + (f": {said}" if said else ""),
            where=script,
            next_step=f"run it where the network is, put {DATA} into the task's folder, and stage again",
            exit_code=Exit.FAILED,
        )
    return made


def stage_task(
    root: Root,
    task: Task,
    source: Path | None,
    *,
    again: bool = False,
    keep_sources: bool = False,
    say: Say = lambda _: None,
) -> StagedTask:
    """Stage `task` from the files in `source`; without it, download them if the task needs any.

    Args:
        keep_sources: keep downloads in `vault/.sources/`.

    Raises:
        AutorlError: a source file is missing or does not match its pin, or a prepared file does not.
    """
    check_task(task)
    if (
        not again
        and (root.task_store(task.name) / MANIFEST_NAME).exists()
        and (root.task_vault(task.name) / MANIFEST_NAME).exists()
    ):
        say(f"{task.name}: staged already; verifying")
        return verify_staged_task(root, task)
    downloads = source is None and bool(task.file.sources)
    if downloads:
        source = _download(root, task, say)
    _check_sources(task, source, say)
    # In the vault, because it contains held-out items and a killed staging leaves it behind.
    work = root.vault / f".tmp-{task.name}-{os.getpid()}"
    try:
        shutil.rmtree(work, ignore_errors=True)
        root.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(root.vault, 0o700)
        work.mkdir(mode=0o700)
        say(f"{task.name}: preparing")
        if task.smith is None:
            _prepare(task, source, work)
        else:
            task = prepare_smith(task, source, work, say)
        _check_pins(task, work)
        store = StoreManifest(
            name=task.name,
            kind="task",
            source=task.file.source,
            licence=task.file.licence,
            files=describe_files(work, _made(work, train_names(task))),
        )
        vault = StoreManifest(
            name=task.name,
            kind="vault",
            source=task.file.source,
            licence=task.file.licence,
            files=describe_files(work, _made(work, vault_names(task))),
        )
        _install(work, train_names(task), root.task_store(task.name), store, private=False)
        _install(work, vault_names(task), root.task_vault(task.name), vault, private=True)
    except OSError as error:
        raise from_os_error(error, f"staging {task.name}", lasting(error, work, root)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if downloads and not keep_sources:
        remove_sources(root, task.name)
    say(
        f"{task.name}: {len(store.files)} training files, splits {', '.join(f'{k} {v.n}' for k, v in task.file.splits.items())}"
    )
    return StagedTask(store, vault)


def lasting(error: OSError, work: Path, root: Root) -> Path:
    """Return the path for an error message: the failed file, unless it was in the work folder, which is deleted by then."""
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes, os.PathLike)) else work
    return root.path if named.is_relative_to(work) else named


def _download(root: Root, task: Task, say: Say) -> Path:
    """Fetch the source files and return their folder.

    Raises:
        AutorlError: a required file has no address, or a download failed.
    """
    wanted = wanted_sources(task)
    by_hand = [one.pinned for one in wanted if one.address is None and not one.pinned.optional]
    if not by_hand:
        return fetch_sources(root, task, wanted, say=say)
    fetched = [f"{one.pinned.file} from {one.address.shown}" for one in wanted if one.address]
    raise AutorlError(
        f"task {task.name} needs its source files, and {by_hand[0].file} can't be fetched by machine",
        where=task.folder / "task.yaml",
        next_step="get "
        + ", ".join([f"{s.file} from {s.url or task.file.source}" for s in by_hand] + fetched)
        + f" into one folder and run: autorl-hpc stage {task.name} --from DIR"
        + "".join(f"; optional beside them: {_purpose(task, s)}" for s in task.file.sources if s.optional),
    )


def _check_sources(task: Task, source: Path | None, say: Say) -> None:
    if source is None:
        return
    for wanted in task.file.sources:
        path = source / wanted.file
        if not path.is_file():
            if wanted.optional:
                say(f"{task.name}: {wanted.file} is not there; the recipe that needs it can't be used")
                continue
            raise AutorlError(
                f"{wanted.file} is missing",
                where=path,
                next_step=f"get it from {wanted.url or task.file.source} and stage again",
            )
        digest = is_pinned(path, wanted)
        if digest is not None:
            raise AutorlError(
                f"{wanted.file} has sha256 {digest}, the task pins {wanted.sha256}: truncated, re-encoded or altered",
                where=path,
                next_step=f"get the original from {wanted.url or task.file.source} and stage again",
            )
        say(f"{task.name}: {wanted.file} is the wanted file")


def _purpose(task: Task, pinned: SourceFile) -> str:
    """Return an optional source file with its purpose and origin."""
    needing = [recipe.name for recipe in task.file.recipes if pinned.file in recipe_files(recipe)]
    use = f", for recipe {', '.join(needing)}" if needing else ""
    return f"{pinned.file}{use}, from {pinned.url or task.file.source}"


def _load_prepare(task: Task) -> ModuleType:
    path = task.folder / "prepare.py"
    spec = importlib.util.spec_from_file_location(f"autorl_task_{task.name}_prepare", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise AutorlError(
            f"task {task.name} has no prepare.py", where=path, next_step="add one; see docs/adding-a-task.md"
        )
    module = importlib.util.module_from_spec(spec)
    with _own_code(task, "can't be loaded", "correct it; a package that it imports must be installed here"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "prepare", None)):
        raise AutorlError(
            f"prepare.py of task {task.name} has no function prepare(source, out)",
            where=path,
            next_step="add it; see docs/adding-a-task.md",
        )
    return module


def _prepare(task: Task, source: Path | None, work: Path) -> None:
    """Run the task's prepare.py.

    Raises:
        AutorlError: it failed.
    """
    module = _load_prepare(task)
    advice = "check the source files; if they are the pinned ones, the defect is in prepare.py"
    with _own_code(task, "failed", advice, (AutorlError, OSError)):
        module.prepare(source, work)


@contextmanager
def _own_code(
    task: Task, verb: str, next_step: str, passed: tuple[type[Exception], ...] = (AutorlError,)
) -> Iterator[None]:
    """Wrap code of the task's folder: its errors (except `passed`) and `sys.exit` are reported as its defects."""
    path = task.folder / "prepare.py"
    try:
        yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        words = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else _words(error)
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else own[-1].lineno if own else None
        raise AutorlError(
            f"prepare.py of task {task.name} {verb}: {words}",
            where=f"{path}:{line}" if line else path,
            next_step=next_step,
            exit_code=Exit.FAILED,
        ) from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _made(work: Path, names: list[str]) -> list[str]:
    """Return the names that exist; without an optional source, a file is left out."""
    return [name for name in names if (work / name).is_file()]


def _check_pins(task: Task, work: Path) -> None:
    pins = {**task.file.train_files, **vault_pins(task)}
    for recipe in task.file.recipes:
        pins |= {name: digest for name, digest in recipe_files(recipe).items() if (work / name).is_file()}
    for name, digest in pins.items():
        path = work / name
        made = file_sha256(path) if path.is_file() else "no file"
        if made != digest:
            raise AutorlError(
                f"prepare.py made another {name} than task.yaml pins ({made[:16]}, pinned {digest[:16]})",
                where=task.folder / "prepare.py",
                next_step="task.yaml and prepare.py must be changed together",
                exit_code=Exit.FAILED,
            )
    if task.smith is None:  # smith rows were checked one by one
        check_items(task, work, task.folder / "prepare.py")


def _install(work: Path, names: list[str], target: Path, manifest: StoreManifest, *, private: bool) -> None:
    fresh = target.parent / f".tmp-{target.name}-new-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name in _made(work, names):
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work / name, fresh / name)
    write_manifest(fresh, manifest)
    replace_folder(fresh, target, private=private)


def replace_folder(fresh: Path, target: Path, *, private: bool = False) -> None:
    """Replace `target` by `fresh` and remove write permissions."""
    for parent, folders, names in os.walk(fresh):
        for name in names:
            os.chmod(Path(parent) / name, 0o400 if private else 0o444)
        for name in folders:
            os.chmod(Path(parent) / name, 0o700 if private else 0o755)
    os.chmod(fresh, 0o700 if private else 0o755)
    if target.exists():
        old = target.parent / f".tmp-{target.name}-old-{os.getpid()}"
        remove_folder(old)  # left by a killed process with the same pid
        os.rename(target, old)
        try:
            os.rename(fresh, target)
        except OSError:
            os.rename(old, target)
            raise
        remove_folder(old)
    else:
        os.rename(fresh, target)

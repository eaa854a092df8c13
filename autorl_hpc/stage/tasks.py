"""Stage a task: fetch or check its source files, run its prepare.py (or cut an rl-smith folder), check every hash, install."""

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.checkpoint import file_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME, describe_files, write_manifest
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import Derived, SourceFile
from autorl_hpc.stage.download import NoNetwork, Pin, elsewhere, fetch
from autorl_hpc.stage.sources import HttpSource, Say, address_of, remove_folder, work_folder
from autorl_hpc.tasks import heldout
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.heldout import StagedTask
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.smith import DATA, DOWNLOAD, SHARES, pinned, write_splits

# --- derived source files: the first rows of a JSON list, one per line, gzipped. The pin covers the text: zlib versions differ.

MAX_RAW_BYTES: Final = 1024 * 1024 * 1024
MAX_TEXT_BYTES: Final = 256 * 1024 * 1024  # limit for the unpacked text, because a small file can unpack to any size


def is_pinned(path: Path, pinned: SourceFile) -> str | None:
    """Return None if the file matches the task's pin, else its sha256."""
    digest = file_sha256(path)
    if digest == pinned.sha256 or (pinned.derived is not None and _text_sha256(path) == pinned.derived.sha256):
        return None
    return digest


def make_derived(raw: Path, target: Path, derived: Derived) -> None:
    """Make the derived file from the download. Raises AutorlError: it is not a suitable list, or the result is not the pinned one."""
    words, text = "", b""
    try:
        rows = json.loads(reading.read_bytes(raw, max_bytes=MAX_RAW_BYTES))
        if not isinstance(rows, list) or len(rows) < derived.n:
            held = f"{len(rows)} rows" if isinstance(rows, list) else "no list"
            words = f"holds {held}, needed are {derived.n} rows"
        else:  # JSON may contain half of a surrogate pair, which UTF-8 can't encode
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows[: derived.n]]
            text = "".join(lines).encode("utf-8", "replace")
            if (made := hashlib.sha256(text).hexdigest()) != derived.sha256:
                words = f"gives a text with sha256 {made}, the task pins {derived.sha256}"
    except (ValueError, RecursionError) as error:
        words = f"is not JSON: {str(error)[:200]}"
    if words:
        what = f"{target.name} can't be made: what is at {derived.url.partition('?')[0]} {words}"
        advice = "get the file from somebody who has it, and stage with --from DIR"
        raise AutorlError(what, where=target, next_step=advice, exit_code=Exit.FAILED)
    atomic.write_bytes(target, gzip.compress(text, mtime=0))


def _text_sha256(path: Path) -> str | None:
    unpack = zlib.decompressobj(wbits=31)
    try:
        text = unpack.decompress(reading.read_bytes(path, max_bytes=MAX_TEXT_BYTES), MAX_TEXT_BYTES)
    except (zlib.error, ValueError):
        return None
    # not truncated, not too long, no data after the end
    return hashlib.sha256(text).hexdigest() if unpack.eof and not unpack.unused_data else None


# --- fetching a task's source files, each checked against its pin

Wanted = tuple[SourceFile, HttpSource | None]
"""A source file and its address; without an address only a person can get it."""


def wanted_sources(task: Task) -> list[Wanted]:
    """Return the task's source files. Raises AutorlError if an address in task.yaml is invalid."""
    urls = [(source, source.derived.url if source.derived else source.url) for source in task.file.sources]
    try:
        return [(source, address_of(url) if url else None) for source, url in urls]
    except AutorlError as error:
        raise error.of_field("sources", task.folder / "task.yaml") from None


def sources_folder(root: Root, name: str) -> Path:
    """Return the folder for downloads; in the vault, because they contain the held-out items."""
    return root.vault / ".sources" / name


def fetch_sources(root: Root, task: Task, *, say: Say = lambda _: None) -> Path:
    """Download all source files that have an address, and return their folder. Raises NoNetwork with the list of files to
    fetch elsewhere; AutorlError: a required file has no address, a download failed, or a file does not match its pin."""
    wanted = wanted_sources(task)
    if by_hand := [file.file for file, address in wanted if address is None and not file.optional]:
        what = f"task {task.name} needs its source files, and {by_hand[0]} can't be fetched by machine"
        places = ", ".join(f"{file.file} from {_place(task, file)}{_optional(file)}" for file, _ in wanted)
        advice = f"get {places} into one folder and run: autorl-hpc stage {task.name} --from DIR"
        raise AutorlError(what, where=task.folder / "task.yaml", next_step=advice)
    folder = sources_folder(root, task.name)
    for place in (root.vault, folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(place, 0o700)
    for file, address in wanted:
        target = folder / file.file
        if address is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        say(f"{task.name}: {file.file} from {address.shown}")
        try:
            if file.derived is None:
                fetch(address, target, Pin(sha256=file.sha256), say=say)
            elif not target.is_file() or is_pinned(target, file) is not None:
                raw = target.with_name(f"{target.name}.made-of")
                fetch(address, raw, say=say)
                try:
                    make_derived(raw, target, file.derived)
                finally:
                    raw.unlink()
        except NoNetwork as error:
            files = [f"           {f.file}  {_place(task, f)}  sha256 {f.sha256}{_optional(f)}\n" for f, _ in wanted]
            error.next_step = elsewhere(task.name, f"put these files into a folder DIR\n{''.join(files)}          ")
            raise
    return folder


def _place(task: Task, file: SourceFile) -> str:
    """Return where a source file comes from, in words."""
    if file.derived is not None:
        return f"the first {file.derived.n} rows of {file.derived.url.partition('?')[0]}"
    address = address_of(file.url) if file.url else None
    return address.shown if address else file.url or task.file.source


def _optional(file: SourceFile) -> str:
    return "  (optional)" if file.optional else ""


# --- rl-smith folders: rows are cut into three splits, and the result is pinned

MAX_SHOWN_CHARS = 500


def prepare_smith(task: Task, source: Path | None, work: Path, say: Say) -> Task:
    """Write training rows (of `source`, else the task's own) and held-out items below `work`; return the task with their pins.
    Raises AutorlError."""
    assert task.smith is not None
    data = task.folder / DATA if source is None else source / Path(DATA).name
    if source is None and not data.is_file() and (task.folder / DOWNLOAD).is_file():
        data = _downloaded(task, work / "download", say)
    if not data.is_file():
        advice = f"put the rows there, or into a folder DIR with --from DIR; or add {DOWNLOAD}, which makes them"
        raise AutorlError(f"{data.name} of task {task.name} is missing", where=data, next_step=advice)
    write_splits(task.smith, data, task.name, work)
    shares = ", ".join(f"{name} {share} %" for name, share in SHARES.items())
    say(f"{task.name}: rows of {data.name} cut into {shares}")
    return replace(task, file=pinned(task.file, file_sha256(data), work))


def _downloaded(task: Task, copy: Path, say: Say) -> Path:
    """Run the task's download_data.py in a private copy of its folder, so that held-out rows are nowhere else; return its data file."""
    script = task.folder / DOWNLOAD
    say(f"{task.name}: running {script}: the task's own code, with your rights and network")
    for name in walk_files(task.folder):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(task.folder / name, copy / name)
    argv = [sys.executable, DOWNLOAD]
    done = subprocess.run(argv, cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode or not (copy / DATA).is_file():
        failed = f"failed with exit code {done.returncode}" if done.returncode else f"made no {DATA}"
        said = (done.stderr or done.stdout).strip()[-MAX_SHOWN_CHARS:]
        what = f"{DOWNLOAD} of task {task.name} {failed}" + (f": {said}" if said else "")
        advice = f"run it where the network is, put {DATA} into the task's folder, and stage again"
        raise AutorlError(what, where=script, next_step=advice, exit_code=Exit.FAILED)
    return copy / DATA


def stage_task(
    root: Root,
    task: Task,
    source: Path | None,
    *,
    again: bool = False,
    keep_sources: bool = False,
    say: Say = lambda _: None,
) -> StagedTask:
    """Stage `task` from the files in `source`, or download what it needs (to `vault/.sources/`, where it stays with `keep_sources`).
    Raises AutorlError: a source file is missing, or it or a prepared file does not match its pin."""
    check_task(task)
    folders = (root.task_store(task.name), root.task_vault(task.name))
    if not again and all((folder / MANIFEST_NAME).exists() for folder in folders):
        say(f"{task.name}: staged already; verifying")
        return heldout.verify_staged_task(root, task)
    downloads = source is None and bool(task.file.sources)
    if downloads:
        source = fetch_sources(root, task, say=say)
    _check_sources(task, source, say)
    try:
        root.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(root.vault, 0o700)
        # In the vault, because it contains held-out items and a killed staging leaves it behind.
        with work_folder(root.vault, task.name, mode=0o700) as work:
            say(f"{task.name}: preparing")
            if task.smith is None:
                _prepare(task, source, work)
            else:
                task = prepare_smith(task, source, work, say)
            done = install_task(root, task, work)
    except OSError as error:
        raise from_os_error(error, f"staging {task.name}", lasting(error, root)) from error
    if downloads and not keep_sources:
        shutil.rmtree(sources_folder(root, task.name), ignore_errors=True)
    splits = ", ".join(f"{name} {pin.n}" for name, pin in task.file.splits.items())
    say(f"{task.name}: {len(done.store.files)} training files, splits {splits}")
    return done


def install_task(root: Root, task: Task, work: Path, beside: Sequence[str] = ()) -> StagedTask:
    """Check what was made in `work` against the task's pins and install it. `beside`: further files for the store."""
    _check_pins(task, work)
    store = _install(work, task, "task", [*sorted(task.file.train_files), *beside], root.task_store(task.name))
    return StagedTask(store, _install(work, task, "vault", heldout.vault_names(task), root.task_vault(task.name)))


def lasting(error: OSError, root: Root) -> Path:
    """Return the path for an error message: the failed file, unless it was in a work folder, which is gone by then."""
    path = Path(os.fsdecode(error.filename or "")) if not isinstance(error.filename, int) else root.path
    return path if path.exists() else root.path


def _check_sources(task: Task, source: Path | None, say: Say) -> None:
    for wanted in task.file.sources if source is not None else ():
        assert source is not None
        path, place = source / wanted.file, wanted.url or task.file.source
        if not path.is_file():
            if wanted.optional:
                say(f"{task.name}: {wanted.file} is not there; the recipe that needs it can't be used")
                continue
            advice = f"get it from {place} and stage again"
            raise AutorlError(f"{wanted.file} is missing", where=path, next_step=advice)
        if digest := is_pinned(path, wanted):
            what = f"{wanted.file} has sha256 {digest}, the task pins {wanted.sha256}: truncated, re-encoded or altered"
            raise AutorlError(what, where=path, next_step=f"get the original from {place} and stage again")
        say(f"{task.name}: {wanted.file} is the wanted file")


def _prepare(task: Task, source: Path | None, work: Path) -> None:
    """Run the task's prepare.py. Raises AutorlError if it is missing, can't be loaded or failed."""
    path = task.folder / "prepare.py"
    if not path.is_file():
        advice = "add one; see docs/adding-a-task.md"
        raise AutorlError(f"task {task.name} has no prepare.py", where=path, next_step=advice)
    spec = importlib.util.spec_from_file_location(f"autorl_task_{task.name}_prepare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    verb, advice = "can't be loaded", "correct it; a package that it imports must be installed here"
    try:
        spec.loader.exec_module(module)
        verb, advice = "failed", "check the source files; if they are the pinned ones, the defect is in prepare.py"
        module.prepare(source, work)
    except (AutorlError, OSError):
        raise
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"[:500]
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
        what, where = f"prepare.py of task {task.name} {verb}: {words}", f"{path}:{line}" if line else path
        raise AutorlError(what, where=where, next_step=advice, exit_code=Exit.FAILED) from error


def _check_pins(task: Task, work: Path) -> None:
    pins = {**task.file.train_files, **heldout.vault_pins(task)}
    for recipe in task.file.recipes:
        pins |= {name: digest for name, digest in heldout.recipe_files(recipe).items() if (work / name).is_file()}
    for name, digest in pins.items():
        path = work / name
        made = file_sha256(path) if path.is_file() else "no file"
        if made != digest:
            what = f"prepare.py made another {name} than task.yaml pins ({made[:16]}, pinned {digest[:16]})"
            where, advice = task.folder / "prepare.py", "task.yaml and prepare.py must be changed together"
            raise AutorlError(what, where=where, next_step=advice, exit_code=Exit.FAILED)
    if task.smith is None:  # smith rows were checked one by one
        heldout.check_items(task, work, task.folder / "prepare.py")


def _install(work: Path, task: Task, kind: Literal["task", "vault"], names: list[str], target: Path) -> StoreManifest:
    """Put those of the files that were made into their final folder; without an optional source, a file is left out."""
    made = [name for name in names if (work / name).is_file()]
    origin = {"source": task.file.source, "licence": task.file.licence}
    manifest = StoreManifest(name=task.name, kind=kind, files=describe_files(work, made), **origin)
    fresh = target.parent / f".tmp-{target.name}-new-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)  # a task may have no training files
    for name in made:
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work / name, fresh / name)
    write_manifest(fresh, manifest)
    replace_folder(fresh, target, private=kind == "vault")
    return manifest


def replace_folder(fresh: Path, target: Path, *, private: bool = False) -> None:
    """Replace `target` by `fresh` and remove write permissions."""
    for parent, _, names in os.walk(fresh):
        os.chmod(parent, 0o700 if private else 0o755)
        for name in names:
            os.chmod(Path(parent) / name, 0o400 if private else 0o444)
    old = target.parent / f".tmp-{target.name}-old-{os.getpid()}"
    remove_folder(old)  # left by a killed process with the same pid
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(fresh, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    remove_folder(old)

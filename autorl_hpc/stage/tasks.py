"""Staging a task: its prepare.py makes the training files and the two held-out splits, and every hash is checked.

Training files go to store/, held-out items to vault/ with mode 0700. A folder gets its manifest last and its name by
rename, so a staging that was killed leaves nothing that looks staged.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files.hashing import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import MANIFEST_NAME, describe_files, write_manifest
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import SourceFile
from autorl_hpc.stage.derive import is_pinned
from autorl_hpc.stage.progress import Say
from autorl_hpc.stage.smith import prepare_smith
from autorl_hpc.stage.task_sources import fetch_sources, remove_sources, wanted_sources
from autorl_hpc.stage.work import remove_folder
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.staged import (
    StagedTask,
    check_items,
    recipe_files,
    train_names,
    vault_names,
    vault_pins,
    verify_staged_task,
)


def stage_task(
    root: Root,
    task: Task,
    source: Path | None,
    *,
    again: bool = False,
    keep_sources: bool = False,
    say: Say = lambda _: None,
) -> StagedTask:
    """Stages `task` from the files in `source`; without one they are downloaded, where the task needs any.

    Args:
        keep_sources: leave what was downloaded in `vault/.sources/`.

    Raises:
        AutorlError: a source file is missing or is not the pinned one; a made file differs from the task's pin.
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
    # In the vault: the held-out items lie in it, and a staging that is killed leaves it behind.
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
    """The place to name in a message: the file that could not be read or written, unless it lay in the folder that is gone
    by the time somebody looks."""
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes, os.PathLike)) else work
    return root.path if named.is_relative_to(work) else named


def _download(root: Root, task: Task, say: Say) -> Path:
    """The folder of the source files, fetched.

    Raises:
        AutorlError: one that the task needs can't be fetched by machine, or a download failed.
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
    for pinned in task.file.sources:
        path = source / pinned.file
        if not path.is_file():
            if pinned.optional:
                say(f"{task.name}: {pinned.file} is not there; the recipe that needs it can't be used")
                continue
            raise AutorlError(
                f"{pinned.file} is missing",
                where=path,
                next_step=f"get it from {pinned.url or task.file.source} and stage again",
            )
        digest = is_pinned(path, pinned)
        if digest is not None:
            raise AutorlError(
                f"{pinned.file} has sha256 {digest}, the task pins {pinned.sha256}: truncated, re-encoded or altered",
                where=path,
                next_step=f"get the original from {pinned.url or task.file.source} and stage again",
            )
        say(f"{task.name}: {pinned.file} is the pinned file")


def _purpose(task: Task, pinned: SourceFile) -> str:
    """An optional source with what it is for and where it comes from."""
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
    """Runs the task's prepare.py.

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
    """Around code of the task's folder: what it raises is its defect but for `passed`, and a program that calls `sys.exit` has not
    prepared."""
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
    """Those that were made: an optional source that is not there leaves a file out."""
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
    if task.smith is None:  # its rows were looked at one by one
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
    """Puts `fresh` in the place of `target` and takes the write bits away."""
    for parent, folders, names in os.walk(fresh):
        for name in names:
            os.chmod(Path(parent) / name, 0o400 if private else 0o444)
        for name in folders:
            os.chmod(Path(parent) / name, 0o700 if private else 0o755)
    os.chmod(fresh, 0o700 if private else 0o755)
    if target.exists():
        old = target.parent / f".tmp-{target.name}-old-{os.getpid()}"
        remove_folder(old)  # of a process with this number that was killed
        os.rename(target, old)
        try:
            os.rename(fresh, target)
        except OSError:
            os.rename(old, target)
            raise
        remove_folder(old)
    else:
        os.rename(fresh, target)

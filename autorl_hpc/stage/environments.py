"""Stage the environment that agents train in: a container image, or a venv that is built in its final place from wheels alone,
without network, and is then read-only."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, progress, store
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import IMAGE, LOCK, VENV, WHEELS, present_hash, verify_environment
from autorl_hpc.records.base import is_name
from autorl_hpc.records.exchange import EnvironmentFacts, EnvironmentPointer, StoreManifest
from autorl_hpc.stage.sources import Say, alone, check_space, in_words, last_words, pip, remove_folder, work_folder
from autorl_hpc.states import Fault

PREFIX = "env:"  # prefix of environment names on the command line
SIF_MAGIC, SIF_MAGIC_AT = b"SIF_MAGIC", 32
"""https://github.com/apptainer/sif: the magic follows a launch script of 32 bytes."""

COMPILED_SHARE = 1.5  # size of installed and compiled files relative to the unpacked wheels
MADE = "venv made of the wheels by pip"


def stage_environment(
    root: Root, name: str, *, requirements: Path | None, source: Path | None, again: bool, say: Say
) -> StoreManifest:
    """Stage the environment `name` of `requirements` (as pip reads it; default: `requirements.lock` in `source`), from a folder of
    wheels or a `.sif` image (`source`), the package index, or with `again` alone the venv's own wheels. Raises AutorlError: a package
    has no wheel, a hash is wrong, or the disk is too small."""
    if not is_name(name):
        what = f"{name!r} is not a name of an environment: letters, digits, `.`, `_` and `-`"
        raise AutorlError(what, next_step="choose another name")
    present = present_hash(root, name)
    if not again and present is not None:
        say(f"{PREFIX}{name}: staged already; verifying (--again makes it anew)")
        return verify_environment(root, name)
    try:
        with work_folder(root.environments, name) as work:
            if source is not None and source.is_file():
                return _stage_image(root, name, source, work, requirements, say)
            expected = None
            # Not the requirements' text, which may contain an index's password.
            origin = "the package index" if source is None else str(source)
            if requirements is not None:
                origin = f"{requirements.name} ({file_sha256(requirements)[:12]}), from {origin}"
            elif source is not None:
                requirements = source / LOCK
            elif present is not None:
                source, origin, expected = root.environment(name, present) / WHEELS, "its own wheels", present
                requirements = source.parent / LOCK
            else:
                advice = f"autorl-hpc stage {PREFIX}{name} --requirements FILE, or --from IMAGE.sif"
                raise AutorlError(f"what environment {name} is made of is not known", next_step=advice)
            _gather(name, work, requirements, source, say)
            return build_environment(root, name, work, origin, expected=expected, say=say)
    except OSError as error:
        raise from_os_error(error, f"staging {PREFIX}{name}", error.filename or root.environments) from error


def python_tag() -> str:
    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def _stage_image(root: Root, name: str, image: Path, work: Path, requirements: Path | None, say: Say) -> StoreManifest:
    with open(image, "rb") as file:
        head = file.read(SIF_MAGIC_AT + len(SIF_MAGIC))
    if head[SIF_MAGIC_AT:] != SIF_MAGIC or requirements is not None:
        what = f"{image.name} is no apptainer image (SIF), or it was given with --requirements, which an image doesn't need"
        advice = "make one: apptainer build IMAGE.sif docker://...; for a venv give --from the folder of its wheels"
        raise AutorlError(what, where=image, next_step=advice)
    check_space(work, image.stat().st_size, f"the image {image.name}")
    say(f"{PREFIX}{name}: copying and hashing the image")
    progress.copy(image, work / IMAGE)
    return install_image(root, name, work, str(image), say=say)


def install_image(
    root: Root, name: str, work: Path, origin: str, *, expected: str | None = None, say: Say = lambda _: None
) -> StoreManifest:
    """Install the image in `work`, and point `name` to it. Raises AutorlError: its hash is not the `expected` one."""
    os.chmod(work / IMAGE, 0o444)
    digest = file_sha256(work / IMAGE)
    with _lock(root, name, digest, expected):
        folder = root.environment(name, digest)
        manifest = _described(work, name, digest, origin, EnvironmentFacts(kind="image"))
        if _stands(root, name, digest) is None:
            remove_folder(folder)
            store.write_manifest(work, manifest)
            os.rename(work, folder)
        return _point(root, manifest, say)


def _described(folder: Path, name: str, digest: str, origin: str, facts: EnvironmentFacts) -> StoreManifest:
    files = store.describe_files(folder, store.environment_files(folder))
    same = {"name": name, "content_hash": digest, "source": origin, "environment": facts, "files": files}
    return StoreManifest(kind="environment", derived=MADE if facts.kind == "venv" else None, **same)


def _gather(name: str, work: Path, requirements: Path, source: Path | None, say: Say) -> None:
    """Download the wheels into `work/wheels/` and write the lock file with the hash of each."""
    wheels = work / WHEELS
    wheels.mkdir()
    say(f"{PREFIX}{name}: gathering wheels for {python_tag()}")
    offline = [] if source is None else ["--isolated", "--no-index", "--find-links", str(source)]
    pip(
        ["download", *offline, "--only-binary", ":all:", "-d", str(wheels), "-r", str(requirements)],
        f"the wheels of {PREFIX}{name} could not be gathered",
        "a package without a wheel for this Python: build it (pip wheel -w DIR PACKAGE) and stage with --from DIR; "
        "no network on this node: stage on the login node, or bring a bundle",
        where=requirements,
        fault=Fault.CLUSTER if source is None else None,
    )
    lines = []
    for wheel in sorted(wheels.iterdir()):
        package, version = wheel.name.split("-")[:2]  # PEP 427: no dash within either
        lines.append(f"{package}=={version} --hash=sha256:{file_sha256(wheel)}\n")
    atomic.write_bytes(work / LOCK, "".join(lines).encode())


def build_environment(
    root: Root, name: str, work: Path, origin: str, *, expected: str | None = None, say: Say = lambda _: None
) -> StoreManifest:
    """Build the venv from the wheels and the lock file in `work`, and point `name` to it. Raises AutorlError: the content hash is
    not the `expected` one, or pip failed."""
    wheels = sorted((work / WHEELS).iterdir())
    digest = store.wheels_hash([file_sha256(wheel) for wheel in wheels], python_tag())
    try:
        unpacked = sum(info.file_size for wheel in wheels for info in zipfile.ZipFile(wheel).infolist())
    except zipfile.BadZipFile as error:
        raise AutorlError(f"a wheel is damaged: {error}", where=work, next_step="get the wheels again") from None
    check_space(work, int(COMPILED_SHARE * unpacked), f"the venv of {PREFIX}{name}")
    with _lock(root, name, digest, expected):
        folder = root.environment(name, digest)
        if (there := _stands(root, name, digest)) is not None:
            say(f"{PREFIX}{name}: the same content is there already")
            return _point(root, there, say)
        if folder.exists():
            say(f"{PREFIX}{name}: what stands there is incomplete or was changed; making it anew")
            remove_folder(folder)
        os.rename(work, folder)  # a venv can't be moved later; without a manifest it is not staged yet
        say(f"{PREFIX}{name}: installing {len(wheels)} wheels, {in_words(unpacked)}")
        _make_venv(name, folder)
        for parent, _, names in os.walk(folder, topdown=False):
            for path in (Path(parent) / file for file in names if not (Path(parent) / file).is_symlink()):
                os.chmod(path, 0o555 if path.stat().st_mode & 0o100 else 0o444)
            if parent != str(folder):
                os.chmod(parent, 0o555)
        facts = EnvironmentFacts(kind="venv", python=python_tag(), python_version=sys.version.split()[0])
        manifest = _described(folder, name, digest, origin, facts)
        store.write_manifest(folder, manifest)
        return _point(root, manifest, say)


def _make_venv(name: str, folder: Path) -> None:
    venv = folder / VENV
    # Without pip: an environment holds only its wheels, and some hosts' Python can't install pip.
    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        what = f"Python could not make a venv: {last_words(done.stdout + done.stderr)}"
        advice = "use a Python that has the module venv (package python3-venv)"
        raise AutorlError(what, where=venv, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
    own = ["--isolated", "--python", str(venv / "bin" / "python"), "install", "--no-index", "--no-warn-script-location"]
    pip(
        [*own, "--find-links", str(folder / WHEELS), "--require-hashes", "-r", str(folder / LOCK)],
        f"the wheels of {PREFIX}{name} could not be installed",
        "see pip's message; `pip --version` must be 22.3 or newer",
        where=folder / LOCK,
        fault=None,
    )


def _stands(root: Root, name: str, digest: str) -> StoreManifest | None:
    try:
        return verify_environment(root, name, digest)
    except AutorlError:
        return None


def _lock(root: Root, name: str, digest: str, expected: str | None) -> AbstractContextManager[None]:
    """Return the lock for making an environment of this content. Raises AutorlError if another was `expected`."""
    if expected not in (None, digest):
        what = f"environment {name} would have content {digest[:12]} here, expected is {str(expected)[:12]}: this Python is {python_tag()}"
        advice = "stage it with the Python that it was made for"
        raise AutorlError(what, next_step=advice, exit_code=Exit.ENVIRONMENT)
    return alone(root.environments / f"{atomic.TEMPORARY_PREFIX}{name}.lock", f"staging {PREFIX}{name}")


def _point(root: Root, manifest: StoreManifest, say: Say) -> StoreManifest:
    name, digest = manifest.name, str(manifest.content_hash)
    os.chmod(root.environment(name, digest), 0o555)
    pointer = EnvironmentPointer(name=name, content_hash=digest)
    atomic.write_json(root.environment_pointer(name), pointer.model_dump(mode="json"))
    say(f"{PREFIX}{name}: content {digest}")
    return manifest

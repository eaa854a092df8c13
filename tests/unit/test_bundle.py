"""Bundles: there and back; killed in the middle; on a full disk; evil, foreign, cut or altered ones leave nothing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import archive
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.stage import bundle as unbundle
from autorl_hpc.stage import tasks
from autorl_hpc.stage.stage import stage
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import load_task

NAMES = ["arithmetic", "tiny"]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


@pytest.fixture(scope="module")
def bundles(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bundle of each packing."""
    folder = tmp_path_factory.mktemp("bundles")
    made = {suffix: folder / f"b{suffix}" for suffix in archive.SUFFIXES}
    for path in made.values():
        stage(Root(staged), NAMES, bundle=path)
    return made


def files(root: Root) -> list[str]:
    return sorted(p.relative_to(root.path).as_posix() for p in root.path.rglob("*") if p.is_file() or p.is_symlink())


def refused(root: Root, bundle: Path, words: str, code: Exit = Exit.FAILED, names: list[str] | None = None) -> None:
    with pytest.raises(AutorlError) as caught:
        stage(root, names or [], source=bundle)
    assert words in caught.value.what, caught.value.what
    assert caught.value.next_step and caught.value.exit_code is code
    assert files(root) == [], "something was left"
    assert {p.name for p in root.path.parent.iterdir()} <= {"root", bundle.name}, "something was written elsewhere"


@pytest.mark.parametrize("suffix", archive.SUFFIXES)
def test_there_and_back(root: Root, staged: Path, bundles: dict[str, Path], suffix: str) -> None:
    stage(root, [], source=bundles[suffix])
    assert verify_model(root, "autorl/tiny") == verify_model(Root(staged), "autorl/tiny")
    assert verify_staged_task(root, load_task("arithmetic")) == verify_staged_task(
        Root(staged), load_task("arithmetic")
    )
    assert files(root) == files(Root(staged))
    for path in root.path.rglob("*"):
        other = staged / path.relative_to(root.path)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode), path
    assert stat.S_IMODE(root.vault.stat().st_mode) == 0o700


def test_a_bundle_is_for_its_owner_alone(bundles: dict[str, Path]) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundles.values()} == {0o600}
    with tarfile.open(bundles[".tar"]) as opened:
        modes = {row.name: row.mode for row in opened}
    assert {mode for name, mode in modes.items() if name.startswith("vault/")} == {0o400}


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz"])
def test_the_same_files_give_the_same_bytes(
    staged: Path, bundles: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    copy = Root(tmp_path / "copy")
    shutil.copytree(staged, copy.path)
    for path in copy.path.rglob("*"):
        os.utime(path, (1, 1))
    again = tmp_path / f"other-name{suffix}"
    stage(copy, [*reversed(NAMES), "tiny"], bundle=again)
    assert again.read_bytes() == bundles[suffix].read_bytes()


def test_a_part_of_a_bundle(root: Root, bundles: dict[str, Path]) -> None:
    stage(root, ["tiny"], source=bundles[".tar.zst"])
    assert not (root.store / "tasks").exists() and not list(root.vault.iterdir())
    with pytest.raises(AutorlError, match="holds no gsm8k") as caught:
        stage(root, ["gsm8k"], source=bundles[".tar.zst"])
    assert "arithmetic, autorl/tiny" in (caught.value.next_step or "")


def test_a_second_unpacking_verifies_and_does_not_replace(root: Root, bundles: dict[str, Path]) -> None:
    stage(root, [], source=bundles[".tar"])
    before = {p: p.stat().st_ino for p in root.path.rglob("*") if p.is_file()}
    lines: list[str] = []
    stage(root, [], source=bundles[".tar"], say=lines.append)
    assert {p: p.stat().st_ino for p in root.path.rglob("*") if p.is_file()} == before
    assert "arithmetic: staged already; verifying" in lines
    path = root.model("autorl/tiny") / "config.json"
    os.chmod(path, 0o600)
    path.write_text("{}")
    with pytest.raises(AutorlError, match=r"config\.json of autorl/tiny has"):
        stage(root, [], source=bundles[".tar"])
    stage(root, [], source=bundles[".tar"], again=True)
    verify_model(root, "autorl/tiny")


def test_other_content_is_replaced_only_if_asked(root: Root, bundles: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).resolve().parents[2] / "templates" / "models" / "tiny", source)
    (source / "generation_config.json").write_text('{"a": 1}')
    stage(root, ["autorl/tiny"], source=source)
    with pytest.raises(AutorlError, match="staged already, with other content") as caught:
        stage(root, ["tiny"], source=bundles[".tar"])
    assert "--again" in (caught.value.next_step or "")
    stage(root, ["tiny"], source=bundles[".tar"], again=True)
    assert "package" in verify_model(root, "autorl/tiny").source


# --- interrupted ---


@pytest.mark.parametrize("time", [1, 3])
def test_a_killed_unpacking_is_run_again(root: Root, bundles: dict[str, Path], time: int) -> None:
    """Killed before the given part is installed."""
    calls = 0

    def kills(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == time:
            os.kill(os.getpid(), signal.SIGKILL)
        tasks.replace_folder(*arguments, **named)

    child = os.fork()
    if child == 0:
        try:
            setattr(unbundle, "replace_folder", kills)  # noqa: B010
            stage(root, [], source=bundles[".tar.zst"])
        finally:
            os._exit(3)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if time == 1:
        assert not root.model("autorl/tiny").exists() and not root.task_store("arithmetic").exists()
    for path in root.path.rglob("items.jsonl"):
        assert root.vault in path.parents and stat.S_IMODE(root.vault.stat().st_mode) == 0o700
    stage(root, [], source=bundles[".tar.zst"])
    verify_model(root, "autorl/tiny")
    verify_staged_task(root, load_task("arithmetic"))
    assert not list(root.path.rglob(".tmp-*")), "what the killed one left was not removed"


def test_a_full_disk_leaves_nothing(bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Root(tmp_path / "root")
    small.path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(small.path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        needs.skip("mount", "needs a tmpfs of its own: mount is not allowed here")
    try:
        refused(small, bundles[".tar.zst"], "are missing", Exit.ENVIRONMENT)
        monkeypatch.setattr(unbundle, "check_space", lambda *_: None)  # as a quota is not seen by it
        refused(small, bundles[".tar.zst"], "No space left on device", Exit.ENVIRONMENT)
    finally:
        subprocess.run(["umount", "-l", str(small.path)], check=True)


# --- evil bundles

Member = tuple[tarfile.TarInfo, bytes]


def members(bundle: Path) -> list[Member]:
    with tarfile.open(bundle) as opened:
        return [(row, (opened.extractfile(row) or io.BytesIO()).read()) for row in opened]


def write(path: Path, rows: list[Member], after: bytes = b"") -> Path:
    with open(path, "wb") as raw:
        with tarfile.open(fileobj=raw, mode="w|", format=tarfile.PAX_FORMAT) as made:
            for row, data in rows:
                row.size = len(data) if row.isreg() else 0
                made.addfile(row, io.BytesIO(data))
        raw.write(after)
    return path


def head_of(rows: list[Member]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(rows[0][1])
    return value


def with_head(rows: list[Member], value: Any) -> list[Member]:
    return [(rows[0][0], json.dumps(value).encode()), *rows[1:]]


def put(rows: list[Member], name: str, data: bytes, *, listed: bool = True) -> list[Member]:
    """Adds or replaces a file, in BUNDLE.json too, so that every hash is right."""
    value = head_of(rows)
    row = {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    if listed:
        value["files"] = [file for file in value["files"] if file["path"] != name] + [row]
    kept = [(info, old) for info, old in rows[1:] if info.name != name]
    return with_head([rows[0], *kept, (tarfile.TarInfo(name), data)], value)


def get(rows: list[Member], name: str) -> bytes:
    return next(data for row, data in rows if row.name == name)


def of_type(kind: bytes, target: str = "") -> Callable[[list[Member]], list[Member]]:
    def change(rows: list[Member]) -> list[Member]:
        rows[1][0].type, rows[1][0].linkname = kind, target
        return rows

    return change


def named(name: str) -> Callable[[list[Member]], list[Member]]:
    return lambda rows: put(rows, name, b"x")


def with_part(**fields: Any) -> Callable[[list[Member]], list[Member]]:
    def change(rows: list[Member]) -> list[Member]:
        value = head_of(rows)
        value["parts"].append(fields)
        return with_head(rows, value)

    return change


def in_head(key: str, new: Any) -> Callable[[list[Member]], list[Member]]:
    return lambda rows: with_head(rows, {**head_of(rows), key: new})


TINY = "store/models/autorl/tiny"


def with_code(rows: list[Member]) -> list[Member]:
    """A model with a file of code, in its manifest too."""
    manifest = json.loads(get(rows, f"{TINY}/MANIFEST.json"))
    code = b"print('hello')"
    manifest["files"].append(
        {"path": "modeling.py", "sha256": hashlib.sha256(code).hexdigest(), "size_bytes": len(code)}
    )
    rows = put(rows, f"{TINY}/modeling.py", code)
    return put(rows, f"{TINY}/MANIFEST.json", json.dumps(manifest).encode())


def other_content(rows: list[Member]) -> list[Member]:
    manifest = json.loads(get(rows, f"{TINY}/MANIFEST.json"))
    return put(rows, f"{TINY}/MANIFEST.json", json.dumps({**manifest, "content_hash": "0" * 64}).encode())


def other_task(rows: list[Member]) -> list[Member]:
    """Easier held-out items, with every hash of the bundle right."""
    items = get(rows, "vault/arithmetic/report/items.jsonl").replace(b"#### ", b"#### 0")
    manifest = json.loads(get(rows, "vault/arithmetic/MANIFEST.json"))
    for file in manifest["files"]:
        if file["path"] == "report/items.jsonl":
            file.update(sha256=hashlib.sha256(items).hexdigest(), size_bytes=len(items))
    rows = put(rows, "vault/arithmetic/report/items.jsonl", items)
    return put(rows, "vault/arithmetic/MANIFEST.json", json.dumps(manifest).encode())


def one_byte(rows: list[Member]) -> list[Member]:
    data = bytearray(rows[-1][1])
    data[10] ^= 1
    return [*rows[:-1], (rows[-1][0], bytes(data))]


def longer(rows: list[Member]) -> list[Member]:
    return [*rows[:-1], (rows[-1][0], rows[-1][1] + b"x")]


def long_header(rows: list[Member]) -> list[Member]:
    rows[1][0].pax_headers = {"comment": "x" * 200_000}
    return rows


def sparse(rows: list[Member]) -> list[Member]:
    rows[1][0].pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": "10", "GNU.sparse.map": "0,1"}
    return rows


def huge(rows: list[Member]) -> list[Member]:
    value = head_of(rows)
    value["files"][0]["size_bytes"] = 10**15
    return with_head(rows, value)


EVIL: list[Any] = [
    ("an absolute name", named("/etc/cron.d/x"), "belongs to none of its parts"),
    ("a name that climbs", named(f"{TINY}/../../../../../x"), "belongs to none of its parts"),
    ("a name that climbs in the archive alone", lambda rows: put(rows, "../x", b"x", listed=False), "is not as BUNDLE.json says"),
    ("a hidden name", named(f"{TINY}/.bashrc"), "belongs to none of its parts"),
    ("a name with a line's end", named(f"{TINY}/a\nb"), "belongs to none of its parts"),
    ("a file of no part", named("store/models/org/other/x"), "belongs to none of its parts"),
    ("a file beside the parts", named("runs/x"), "belongs to none of its parts"),
    ("a file below a file", named(f"{TINY}/config.json/x"), "is damaged: 'store/models/autorl/tiny/config.json/x' lies below"),
    ("a part that climbs", with_part(name="../../x", kind="task"), "is no name"),
    ("a model's name that climbs", with_part(name="org/../x", kind="model"), "is no name"),
    ("a symbolic link", of_type(tarfile.SYMTYPE, "/etc/passwd"), "is not a plain file"),
    ("a hard link", of_type(tarfile.LNKTYPE, "BUNDLE.json"), "is not a plain file"),
    ("a FIFO", of_type(tarfile.FIFOTYPE), "is not a plain file"),
    ("a device", of_type(tarfile.CHRTYPE), "is not a plain file"),
    ("a folder", of_type(tarfile.DIRTYPE), "is not a plain file"),
    ("a file with holes", sparse, ""),
    ("a file twice", lambda rows: [*rows, rows[-1]], "is not as BUNDLE.json says"),
    ("a file twice in the head", lambda rows: with_head(rows, {**head_of(rows), "files": head_of(rows)["files"] * 2}), "is twice in"),
    ("a file that is not listed", lambda rows: put(rows, f"{TINY}/x", b"x", listed=False), "is not as BUNDLE.json says"),
    ("a file that is missing", lambda rows: rows[:-1], "it ends without vault/arithmetic/report/items.jsonl"),
    ("an altered byte", one_byte, "has sha256"),
    ("a file that is longer", longer, "is not as BUNDLE.json says"),
    ("a header without end", long_header, "a header of"),
    ("no head", lambda rows: rows[1:], "doesn't begin with BUNDLE.json"),
    ("nothing", lambda rows: [], "evil.tar is not a bundle"),
    ("a head that is not JSON", lambda rows: [(rows[0][0], b"{"), *rows[1:]], "damaged"),
    ("a head nested too deeply", lambda rows: [(rows[0][0], b"[" * 100_000), *rows[1:]], "nested too deeply"),
    ("an environment without facts", with_part(name="x", kind="environment"), "env:x is not described"),
    ("a model with code", with_code, "modeling.py is not a file that is taken of a model"),
    ("a model of other content", other_content, "its manifest says 000000"),
    ("a task of other items", other_task, "was staged by another version of the task"),
    ("a file of a task that no manifest knows", named("vault/arithmetic/x"), "x is not a file of arithmetic"),
    ("an empty file for a manifest", lambda rows: put(rows, f"{TINY}/MANIFEST.json", b""), "can't be read"),
    ("a list for a head", lambda rows: with_head(rows, []), "(the whole file)", Exit.USAGE),
    ("an unknown field", in_head("more", 1), "unknown field", Exit.USAGE),
    ("of a newer version", in_head("schema_version", 2), "newer autorl-hpc", Exit.USAGE),
    ("no parts", in_head("parts", []), "field `parts`", Exit.USAGE),
    ("a negative size", lambda rows: with_head(rows, {**head_of(rows), "files": [{**head_of(rows)["files"][0], "size_bytes": -1}]}), "size_bytes", Exit.USAGE),
    ("a task that is not here", with_part(name="no-such-task", kind="task"), "there is no task `no-such-task`", Exit.USAGE),
    ("more than the disk holds", huge, "are missing", Exit.ENVIRONMENT),
    ("for another Python", with_part(name="x", kind="environment", content_hash="0" * 64, environment={"kind": "venv", "python": "cpython-27-vax"}), "was made for cpython-27-vax", Exit.ENVIRONMENT),
]  # fmt: skip


@pytest.mark.parametrize("row", EVIL, ids=[row[0] for row in EVIL])
def test_an_evil_or_foreign_bundle_is_refused_and_leaves_nothing(
    root: Root, tmp_path: Path, bundles: dict[str, Path], row: Any
) -> None:
    _, change, words, *code = row
    refused(root, write(tmp_path / "evil.tar", change(members(bundles[".tar"]))), words, *code)


def test_something_else_or_something_after_the_end_is_refused(
    root: Root, tmp_path: Path, bundles: dict[str, Path]
) -> None:
    path = tmp_path / "b.tar.zst"
    for content in (b"", b"hello", b"PK\x03\x04" + b"\0" * 100, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\0" * 10240):
        path.write_bytes(content)
        refused(root, path, "b.tar.zst is ")
    path.unlink()
    refused(root, write(tmp_path / "b.tar", members(bundles[".tar"]), b"more"), "something follows its end")


def test_a_bomb_is_refused(root: Root, tmp_path: Path, bundles: dict[str, Path]) -> None:
    rows = write(tmp_path / "b.tar", members(bundles[".tar"]))
    data = rows.read_bytes().rstrip(b"\0")
    rows.unlink()
    bomb = tmp_path / "bomb.tar.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        file.write(data + b"x" * (512 - len(data) % 512))
        row = tarfile.TarInfo(f"{TINY}/config.json")
        row.size = 1 << 40
        file.write(row.tobuf() + b"\0" * (80 * 1024 * 1024))
    refused(root, bomb, "damaged")


@pytest.mark.parametrize(
    ("suffix", "cut", "altered"), [(".tar.zst", 0.3, 0.5), (".tar.gz", 0.99, 0.998), (".tar", 0.0005, None)]
)
def test_a_cut_or_altered_bundle_is_refused(
    root: Root, tmp_path: Path, bundles: dict[str, Path], suffix: str, cut: float, altered: float | None
) -> None:
    data, path = bytearray(bundles[suffix].read_bytes()), tmp_path / f"cut{suffix}"
    path.write_bytes(data[: int(cut * len(data))])
    refused(root, path, f"cut{suffix} is ")
    if altered is not None:
        data[int(altered * len(data))] ^= 0x10
        path.write_bytes(data)
        refused(root, path, "")

"""`export`, and unpacking what claims to be one: what goes in, and what no bundle may do here."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from bundles import HEAD, Files, entries_of, read_bundle, write_bundle
from treemaker import Tree, TreeRun, outcomes
from weights import write_safetensors

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.evidence import unpack
from autorl_hpc.evidence.export import Exported, export_run
from autorl_hpc.evidence.unpack import unpack_evidence
from autorl_hpc.evidence.verify import verify_run
from autorl_hpc.files.archive import add, writing
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.exchange import EvidenceManifest

ALLOWED = 100_000


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def made(path: Path, *, close: bool = True) -> TreeRun:
    """A run with a real artifact, and things beside it that nobody should get."""
    tree = Tree(path)
    run = tree.run().start()
    tensors = {"w": ("F32", np.arange(12, dtype=np.float32).reshape(3, 4))}
    folder = tree.experiment.artifacts / "new"
    (folder / "refs").mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    content = folder_content_hash(folder)
    (folder / "MANIFEST.json").write_text('{"not_in_hash": []}')
    folder.rename(tree.experiment.artifacts / content)
    run.submit(10.0, outcomes(40, range(20)), content_hash=content)
    run.submit(20.0, outcomes(40, range(12)))
    run.seal()
    if close:
        run.close(outcomes(100, range(60)))
    (run.dir.logs / "agent.log").write_text("SECRET of the agent's log")
    (run.dir.items / "notes.txt").write_text("SECRET beside the items")
    (tree.experiment.path / "slurm.json").write_text('{"SECRET": 1}')
    record = json.loads(tree.experiment.resolved.read_text())
    record["root"], record["host"] = "/SECRET/root", {"name": "SECRET"}
    record["spec"]["judge"] = {"url": "http://SECRET:1/v1", "model": "m", "key_file": "/SECRET/key"}
    tree.experiment.resolved.write_text(json.dumps(record))
    code = tree.experiment.code / run.record.code_hash / "tasks" / "arithmetic"
    code.mkdir(parents=True)
    (code / "task.yaml").write_text("name: arithmetic\n")
    (code / "items.jsonl").write_text("SECRET")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TreeRun:
    return made(tmp_path_factory.mktemp("made") / "exp")


@pytest.fixture(scope="module")
def exported(run: TreeRun, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export_run(run.dir.path, tmp_path_factory.mktemp("bundle") / "b.tar.zst")


def unpacked(bundle: Path, into: Path) -> EvidenceManifest:
    into.mkdir()
    return unpack_evidence(bundle, into, lambda manifest: ALLOWED)


def test_what_goes_in(run: TreeRun, exported: Exported) -> None:
    files = read_bundle(exported.path)
    inside = f"experiment/{run.dir.run_id}"
    names = {name for name in files if not name.startswith((f"{inside}/ledger/", "experiment/baselines/"))}
    content = exported.manifest.weights.content_hash if exported.manifest.weights else ""
    assert names == {
        HEAD,
        "experiment/experiment.json",
        f"{inside}/run.json",
        f"{inside}/ledger.jsonl",
        f"{inside}/items/000001.feedback.jsonl.gz",
        f"{inside}/items/000001.report.jsonl.gz",
        f"{inside}/items/000002.feedback.jsonl.gz",
        f"{inside}/report/summary.json",
        f"experiment/artifacts/{content}/model.safetensors",
        "task/task.yaml",
        "task/recipe.json",
    }
    assert len(entries_of(files)) == len(list(run.dir.ledger.iterdir())) == exported.manifest.head.entries
    assert len([name for name in files if name.startswith("experiment/baselines/")]) == 4
    assert not [name for name, data in files.items() if b"SECRET" in data]
    assert json.loads(files["experiment/experiment.json"])["root"] == ""
    with tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(open(exported.path, "rb")), mode="r|") as tar:
        assert {(row.mtime, row.uid, row.gid, row.uname, row.mode) for row in tar} == {(0, 0, 0, "", 0o444)}


def test_the_same_run_gives_the_same_bytes(run: TreeRun, exported: Exported, tmp_path: Path) -> None:
    assert export_run(run.dir.path, tmp_path / "c.tar.zst").sha256 == exported.sha256
    made(tmp_path / "other" / "exp")  # other entries: their times differ
    gz = export_run(run.dir.path, tmp_path / "c.tar.gz")
    assert unpacked(gz.path, tmp_path / "gz") == exported.manifest


def test_there_and_back(run: TreeRun, exported: Exported, tmp_path: Path) -> None:
    manifest = unpacked(exported.path, tmp_path / "out")
    place = ExperimentDir(tmp_path / "out" / "experiment")
    verdict = verify_run(place, place.run(manifest.run_id), exported=True)
    assert verdict.whole and verdict.head == manifest.head.head
    for path in run.dir.ledger.iterdir():
        assert (place.run(manifest.run_id).ledger / path.name).read_bytes() == path.read_bytes()


def test_runs_that_are_not_exported(tmp_path: Path) -> None:
    def refused(run: TreeRun, words: str) -> None:
        with pytest.raises(AutorlError, match=words):
            export_run(run.dir.path, tmp_path / "b.tar.zst")
        assert not list(tmp_path.glob("*b.tar*"))

    refused(made(tmp_path / "a" / "exp", close=False), "not closed yet")
    damaged = made(tmp_path / "b" / "exp")
    (damaged.dir.ledger / "000002.json").unlink()
    refused(damaged, "does not verify: ledger entry 000002")
    lost = made(tmp_path / "c" / "exp")
    for path in sorted(lost.tree.experiment.artifacts.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    refused(lost, "the selected checkpoint, artifacts/.* is not here")
    with pytest.raises(AutorlError, match="says how it is packed"):
        export_run(made(tmp_path / "d" / "exp").dir.path, tmp_path / "b.zip")


def test_a_run_that_kept_the_base_model_has_no_weights(tmp_path: Path) -> None:
    run = Tree(tmp_path / "exp").run().start().seal().close()
    done = export_run(run.dir.path, tmp_path / "b.tar.zst")
    assert done.manifest.weights is None and not any("artifacts" in name for name in read_bundle(done.path))


def refused(bundle: Path, tmp_path: Path, words: str) -> None:
    """Nothing but a clean error, and nothing outside the folder."""
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(AutorlError) as caught:
        unpacked(bundle, tmp_path / "out")
    assert words in caught.value.what, caught.value.what
    assert caught.value.exit_code in (Exit.FAILED, Exit.USAGE) and caught.value.next_step
    outside = {p for p in tmp_path.rglob("*") if p not in before and not p.is_relative_to(tmp_path / "out")}
    assert not outside


EVIL = [
    "../evil",
    "/tmp/evil",
    "experiment/../../evil",
    "experiment/experiment.json/../../../evil",
    "experiment/{run}/../../../evil",
    "experiment/{run}/ledger/../../../../evil.json",
    "experiment/{run}/ledger/000001.json\x00",
    "experiment/{run}/logs/agent.log",
    "experiment/code/x.py",
    "experiment/artifacts/{content}/../../../../evil.safetensors",
    "experiment/artifacts/{content}/pytorch_model.bin",
    "experiment/artifacts/{content}/.safetensors",
    "experiment/artifacts/" + "0" * 64 + "/model.safetensors",
    "task/evaluate.py",
    "EVIDENCE.json",
    "experiment\\x",
]


def packed(path: Path, files: Files) -> Path:
    """A bundle of these files as they are."""
    with open(path, "wb") as raw, writing(raw, ".tar.zst") as archive:
        for name, data in files.items():
            add(archive, name, len(data), 0o444, io.BytesIO(data))
    return path


def test_names_that_no_bundle_has(exported: Exported, tmp_path: Path) -> None:
    files = read_bundle(exported.path)
    content = exported.manifest.weights.content_hash if exported.manifest.weights else ""
    for name in EVIL:
        head = json.loads(files[HEAD])
        evil = name.format(run=exported.manifest.run_id, content=content)
        head["files"].append({"path": evil, "sha256": "0" * 64, "size_bytes": 1})
        bundle = packed(tmp_path / "evil.tar.zst", {**files, HEAD: json.dumps(head).encode()})
        refused(bundle, tmp_path, "is not a file of an exported run")


def test_run_ids_that_lead_elsewhere(exported: Exported, tmp_path: Path) -> None:
    files = read_bundle(exported.path)
    head = json.loads(files[HEAD])["head"]
    for run_id in ("..", ".", "", "a/b", "../../x", "artifacts", "baselines", "x" * 300, "a\nb", "a\x1b[2J"):
        bundle = write_bundle(tmp_path / "e.tar.zst", files, run_id=run_id, head={**head, "run_id": run_id})
        refused(bundle, tmp_path, "is no run")


VICTIM = "experiment/experiment.json"


def test_things_that_are_no_plain_files(exported: Exported, tmp_path: Path) -> None:
    files = read_bundle(exported.path)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
        with open(tmp_path / "e.tar.zst", "wb") as raw, writing(raw, ".tar.zst") as archive:
            add(archive, HEAD, len(files[HEAD]), 0o444, io.BytesIO(files[HEAD]))
            row = tarfile.TarInfo(VICTIM)
            row.type, row.linkname = kind, "../../../evil"
            archive.addfile(row)
        refused(tmp_path / "e.tar.zst", tmp_path, "is not a plain file")


def test_files_that_are_not_as_described(exported: Exported, tmp_path: Path) -> None:
    files = read_bundle(exported.path)
    rest = {name: data for name, data in files.items() if name != VICTIM}
    for others, words in (
        ({}, "it ends without"),
        ({VICTIM: files[VICTIM].replace(b"arithmetic", b"arithmetik")}, "has sha256"),
        ({VICTIM: files[VICTIM] + b" "}, "is not as EVIDENCE.json says"),
        ({VICTIM: b"\0" * (1 << 24)}, "is not as EVIDENCE.json says"),  # it says little and holds much
        ({VICTIM: files[VICTIM], "experiment/extra.json": b"{}"}, "is not as EVIDENCE.json says"),
    ):
        refused(packed(tmp_path / "e.tar.zst", {**rest, **others}), tmp_path, words)


def test_heads_that_are_none(tmp_path: Path) -> None:
    for head in (b"", b"[]", b"[" * 100_000, b'{"schema_version": 99}', b"\xff\xfe"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with pytest.raises(AutorlError):
            unpacked(packed(tmp_path / "e.tar.zst", {HEAD: head}), tmp_path / "out")


def test_sizes_beyond_all_reason(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_bundle(exported.path)
    weights = next(name for name in files if name.endswith(".safetensors"))
    big = write_bundle(tmp_path / "w.tar.zst", {**files, weights: b"\0" * (ALLOWED + 1)})
    assert big.stat().st_size < ALLOWED // 2  # it packs well: only the bound stops it
    refused(big, tmp_path, "its weights are larger than")
    monkeypatch.setattr(unpack.reading, "MAX_RECORD_BYTES", 1000)
    refused(exported.path, tmp_path, "no record is so large")
    monkeypatch.undo()
    monkeypatch.setattr(unpack, "MAX_FILES", 3)
    refused(exported.path, tmp_path, "more records than a run has")

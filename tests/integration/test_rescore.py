"""A run is exported and scored again in another root: nothing is shared but the task and the base model that are staged there."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bundles import Files, forge, read_bundle, solved, write_bundle
from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for
from weights import read_safetensors, write_safetensors

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.evidence.rescore import Rescored, RescoreOptions, rescore_bundle
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.frozen_records import baseline_key
from autorl_hpc.files.layout import Root
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import Science

ITEMS = 12
pytestmark = pytest.mark.xdist_group("rescore")
AGENT = (
    '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n'
    + VARIANTS
    + "variants 0 2\n./submit output/v0\n./submit output/v1\n"
)


@dataclass
class Closed:
    """A closed run, its bundle, and another root."""

    cluster: Cluster
    run_id: str
    bundle: Path
    told: dict[str, Any]
    elsewhere: Root

    @property
    def files(self) -> Files:
        return read_bundle(self.bundle)

    @property
    def inside(self) -> str:
        return f"experiment/{self.run_id}"

    def command(self, bundle: Path, *more: str, root: Root | None = None) -> tuple[int, dict[str, Any]]:
        place = str((root or self.elsewhere).path)
        done = self.cluster.run(
            "rescore", str(bundle), "--root", place, "--device", "cpu", "--json", *more, check=False
        )
        return done.returncode, json.loads(done.stdout)

    def refused(self, bundle: Path, asked: RescoreOptions = RescoreOptions()) -> Rescored:  # noqa: B008
        found = rescore_bundle(self.elsewhere, bundle, asked)
        assert found.problems and not found.compared and not found.holds
        return found


def copied(source: Root, to: Path) -> Root:
    for part in ("store", "vault"):
        shutil.copytree(source.path / part, to / part)
    return Root(to)


@pytest.fixture(scope="module")
def once(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    tmp = tmp_path_factory.mktemp("rescore")
    cluster = Cluster(staged, tmp)
    try:
        cluster.mini_task(ITEMS, max_new_tokens=8)
        cluster.agent("one", AGENT)
        (run_id,) = cluster.prepare(["one"], matrix={"task": "mini"})
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
        grader = cluster.grader()
        wait_for(lambda: cluster.finished([run_id]), "the closing")
        assert grader.wait(PATIENCE_S) == 0, cluster.logs()
        assert "closed: head of" in cluster.logs_of("grader") and "head of" in cluster.logs_of("agent")
        cluster.run("report", str(cluster.experiment.path))
        bundle = tmp / "run.tar.zst"
        run = str(cluster.run_dir(run_id).path)
        told = json.loads(cluster.run("export", run, "--out", str(bundle), "--json").stdout)
        yield Closed(cluster, run_id, bundle, told, copied(cluster.root, tmp / "elsewhere"))
    finally:
        cluster.end()


@pytest.fixture
def closed(once: Closed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Closed]:
    assert once.cluster.code is not None
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(once.cluster.code / "tasks"))
    before = sorted(os.listdir(once.elsewhere.path))
    yield once
    assert sorted(os.listdir(once.elsewhere.path)) == before  # whatever happened, nothing is left


def test_no_held_out_text_is_in_it(closed: Closed) -> None:
    texts: list[bytes] = []
    for split in ("feedback", "report"):
        lines = (closed.cluster.root.task_vault("mini") / split / "items.jsonl").read_text().splitlines()
        texts += [json.dumps(json.loads(line)["question"]).encode()[1:-1] for line in lines]
    assert len(texts) == 2 * ITEMS
    for name, data in closed.files.items():
        plain = gzip.decompress(data) if name.endswith(".gz") else data
        assert not any(text in plain for text in texts), name
        if not name.endswith(".safetensors") and "/ledger" not in name:  # entries name the workspace: they are hashed
            assert str(closed.cluster.root.path).encode() not in plain, name


def forged(closed: Closed, count: int, *, other_texts: bool) -> Files:
    """The bundle of one who writes his score himself, and everything that hangs on it."""
    files = closed.files
    view = closed.cluster.view(closed.run_id)
    assert view.closed is not None
    name = f"{closed.inside}/items/{view.closed.selected:06d}.report.jsonl.gz"
    files[name] = solved(files[name], count, other_texts=other_texts)

    def change(entry: dict[str, Any]) -> None:
        if entry["kind"] == "closed":
            entry["body"]["report"] |= {
                "score": 100.0 * count / ITEMS,
                "correct": count,
                "items_sha256": hashlib.sha256(files[name]).hexdigest(),
            }

    return forge(files, change)


def test_a_repeat_of_100_on_an_engine_of_ones_own_excuses_nothing(closed: Closed, tmp_path: Path) -> None:
    """The base model's answers stay true; its record claims another engine, and a second measurement of 100."""
    files = forged(closed, ITEMS, other_texts=True)
    science = Science.model_validate(json.loads(files[f"{closed.inside}/run.json"])["science"])
    closing = closed.cluster.view(closed.run_id).closed
    assert closing is not None and closing.baseline_report is not None
    old = closing.baseline_report
    base = Baseline.model_validate_json(files[f"experiment/baselines/{old}.json"])
    engine = base.engine.model_copy(update={"device": "cpu: another"})
    key = baseline_key(science, base.evaluation.split, engine.digest())
    claimed = base.model_copy(
        update={
            "key": key,
            "engine": engine,
            "evaluation": base.evaluation.model_copy(update={"engine_hash": engine.digest()}),
            "repeat_score": 100.0,
            "repeat_changed_items": ITEMS,
        }
    )
    files[f"experiment/baselines/{key}.json"] = claimed.canonical() + b"\n"
    files[f"experiment/baselines/{key}.items.jsonl.gz"] = files[f"experiment/baselines/{old}.items.jsonl.gz"]

    def change(entry: dict[str, Any]) -> None:
        if entry["kind"] == "closed":
            entry["body"]["baseline_report"] = key
            entry["body"]["baseline_sha256"][key] = claimed.digest()
            entry["body"]["baseline_sha256"].pop(old)
            entry["body"]["report"]["engine_hash"] = engine.digest()

    code, found = closed.command(write_bundle(tmp_path / "e.tar.zst", forge(files, change)))
    assert found["problems"] == [] and found["noise_claimed"] > 50.0
    assert code == 1 and found["selected"]["word"] == "differs", found["selected"]


def test_a_forged_score(closed: Closed, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "forged.tar.zst", forged(closed, ITEMS, other_texts=False))
    code, found = closed.command(bundle)
    assert code == 1 and not found["holds"] and found["problems"] == []  # the chain fits: the score alone is a lie
    assert found["base"]["word"] == "identical" and found["selected"]["word"] == "differs"
    assert found["selected"]["claimed"] == 100.0 and found["selected"]["here"] < 100.0
    assert found["selected"]["same_text_other_outcome"] == found["selected"]["changed"] > 0
    known = closed.refused(bundle, RescoreOptions(expect=closed.told["head"]))  # who was told the head need not score
    assert "not the one that you expect" in known.problems[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("split", "feedback"),
        ("content_hash", "0" * 64),
        ("items_sha256", None),
        ("prompts_sha256", "0" * 64),
        ("prompts_sha256", None),
    ],
)
def test_a_score_of_something_else(closed: Closed, tmp_path: Path, field: str, value: object) -> None:
    def change(entry: dict[str, Any]) -> None:
        if entry["kind"] == "closed":
            entry["body"]["report"][field] = value

    assert closed.refused(write_bundle(tmp_path / "e.tar.zst", forge(closed.files, change))).problems


def weights_of(files: Files) -> str:
    return next(name for name in files if name.endswith(".safetensors"))


def test_other_weights(closed: Closed, tmp_path: Path) -> None:
    files = closed.files
    name = weights_of(files)
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    found = closed.refused(write_bundle(tmp_path / "e.tar.zst", files))
    assert "was altered: its content hash is" in found.problems[0]
    files[name] = b"no safetensors"
    assert "can't be read" in closed.refused(write_bundle(tmp_path / "e.tar.zst", files)).problems[0]


def test_weights_of_another_shape_under_their_own_hash(closed: Closed, tmp_path: Path) -> None:
    """A tensor of one row would be spread over the whole of the base model's by a careless copy."""
    files = closed.files
    name = weights_of(files)
    content = name.split("/")[2]
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(files.pop(name))
    tensors = read_safetensors(folder / "a.safetensors")
    first = next(key for key, (_, values) in tensors.items() if values.ndim == 2)
    tensors[first] = (tensors[first][0], tensors[first][1][:1])
    write_safetensors(folder / "a.safetensors", tensors)
    new = folder_content_hash(folder)
    files[name.replace(content, new)] = (folder / "a.safetensors").read_bytes()

    def change(entry: dict[str, Any]) -> None:
        text = json.dumps(entry["body"]).replace(content, new)
        entry["body"] = json.loads(text)

    changed = forge(files, change)
    head = json.loads(changed["EVIDENCE.json"])
    bundle = write_bundle(tmp_path / "e.tar.zst", changed, weights={**head["weights"], "content_hash": new})
    assert f"tensor {first!r} does not have the shape" in closed.refused(bundle).problems[0]


def of_other_science(closed: Closed, change: Callable[[dict[str, Any]], None], out: Path) -> Path:
    """The bundle of a run that asks something else, with everything that names it made to fit: a whole chain of its own."""
    files = closed.files
    record = json.loads(files[f"{closed.inside}/run.json"])
    before = Science.model_validate(record["science"])
    change(record["science"])
    science = Science.model_validate(record["science"])
    record |= {"run_id": science.run_id(), "recipe_hash": science.recipe.hash()}
    renamed = {before.recipe.hash(): science.recipe.hash()}
    digests: dict[str, str] = {}
    for name in [name for name in files if name.startswith("experiment/baselines/") and name.endswith("ms.jsonl.gz")]:
        key = name.split("/")[-1].partition(".")[0]
        base = Baseline.model_validate_json(files.pop(f"experiment/baselines/{key}.json"))
        evaluation = base.evaluation.model_copy(update={"recipe_hash": science.recipe.hash()})
        new = baseline_key(science, evaluation.split, base.engine.digest())
        moved = base.model_copy(update={"key": new, "evaluation": evaluation})
        files[f"experiment/baselines/{new}.json"] = moved.canonical() + b"\n"
        files[f"experiment/baselines/{new}.items.jsonl.gz"] = files.pop(name)
        renamed[key], digests[new] = new, moved.digest()
    files = {name.replace(closed.run_id, science.run_id()): data for name, data in files.items()}
    files[f"experiment/{science.run_id()}/run.json"] = json.dumps(record).encode()

    def rename(entry: dict[str, Any]) -> None:
        text = json.dumps(entry["body"])
        for old, new in renamed.items():
            text = text.replace(old, new)
        entry["body"] = json.loads(text)
        if entry["kind"] == "closed":
            entry["body"]["baseline_sha256"] = digests

    changed = forge(files, rename)
    head = json.loads(changed["EVIDENCE.json"])["head"]
    return write_bundle(out, changed, run_id=science.run_id(), head={**head, "run_id": science.run_id()})


RECIPE = "the run's recipe default is not the one of the task here"
SPLIT = "the run's report split is not the one of the task here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["recipe"].update(prompt="The answer is 4. {question}"), RECIPE),
        (lambda s: s["recipe"].update(shots_file="../../../etc/passwd", shots_sha256="0" * 64), RECIPE),
        (lambda s: s["recipe"].update(scorer="task"), RECIPE),
        (lambda s: s["recipe"].update(scorer_version="0"), "an older version: the run's scores are of version 0"),
        (lambda s: s["recipe"].update(name="mine"), "has no recipe `mine`"),
        (lambda s: s["splits"].update(report=s["splits"]["feedback"]), SPLIT),
        (lambda s: s["splits"]["report"].update(folder="feedback"), SPLIT),
        (lambda s: s.update(task="arithmetic"), SPLIT),
    ],
)
def test_what_is_asked_is_this_machines_own(
    closed: Closed, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """run.json may say anything: a prompt that helps, a file of this machine, another scorer, easier items."""
    bundle = of_other_science(closed, change, tmp_path / "e.tar.zst")
    with pytest.raises(AutorlError) as caught:
        rescore_bundle(closed.elsewhere, bundle, RescoreOptions())
    assert words in caught.value.what and caught.value.exit_code is Exit.USAGE


def test_another_science_that_asks_the_same_is_scored(closed: Closed, tmp_path: Path) -> None:
    """So that the refusals above are not those of a bundle that was put together badly."""

    def change(science: dict[str, Any]) -> None:
        science["seed"] = 5

    code, found = closed.command(of_other_science(closed, change, tmp_path / "e.tar.zst"))
    assert code == 0 and found["selected"]["word"] == "identical"


def test_what_is_not_staged_here_or_is_another(closed: Closed, tmp_path: Path) -> None:
    bare = Root(tmp_path / "bare")
    bare.path.mkdir()
    code, told = closed.command(closed.bundle, root=bare)
    assert code == 2 and "base model autorl/tiny is not staged" in told["error"] and not os.listdir(bare.path)
    other = copied(closed.elsewhere, tmp_path / "other")
    shutil.rmtree(other.task_vault("mini"))
    code, told = closed.command(closed.bundle, root=other)
    assert code == 2 and "not staged" in told["error"]
    changed = copied(closed.elsewhere, tmp_path / "changed")
    items = changed.task_vault("mini") / "report" / "items.jsonl"
    items.chmod(0o600)
    items.write_bytes(items.read_bytes().replace(b"1", b"2", 1))
    code, told = closed.command(closed.bundle, root=changed)
    assert code == 1 and "items.jsonl" in told["error"]

"""Extensions through the command line: frames, init, list, gc, and a leaderboard that strangers feed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

import autorl_hpc
from autorl_hpc import cli
from autorl_hpc.files import layout
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec

STORED = Path(__file__).resolve().parents[1] / "contract" / "experiments" / "finished.tar.xz"

pytestmark = pytest.mark.slow


def run(*words: str | Path, code: int = 0) -> Result:
    """Run a command in this process."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == code, f"{words}: {done.output}\n{done.exception!r}"
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment of sixteen runs, as another machine left it."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as source:
        source.extractall(folder)
    return folder / "runs"


def test_frames_say_what_the_report_says(runs: Path, tmp_path: Path) -> None:
    """Rows that are lost or joined to another run, and a score that is not the mean of its items."""
    frames = autorl_hpc.load(runs)
    report = json.loads(run("report", runs, "--out", tmp_path, "--no-figures", "--json").stdout)
    told = {one["run_id"]: one for one in report["runs"]}
    assert set(frames.runs.run_id) == set(told)
    assert len(frames.submissions) == sum(len(one["trajectory"]) for one in told.values())
    for run_id, one in told.items():
        if one["task"] == "arithmetic" and one["selected"] is not None and "copycat" not in run_id:
            rows = frames.items.query("run_id == @run_id and split == 'report' and submission == @one['selected']")
            assert rows.outcome.mean() * 100 == pytest.approx(one["report"]["score"], abs=0.01)
    assert {"loss", "step", "more"} <= set(frames.training.columns) and len(frames.events)
    run("report", runs, "--out", tmp_path, "--no-figures", "--table", "--quiet")
    assert {path.name for path in (tmp_path / "tables").iterdir()} >= {"runs.csv", "items.parquet", "training.csv"}


def test_the_notebook_of_the_docs_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    notebook = json.loads((STORED.parents[3] / "docs" / "examples" / "analysis.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["scored"]) and len(names["chosen"])  # type: ignore[arg-type]


def test_init_writes_files_that_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that the loader refuses, and a file of the user's that is overwritten."""
    monkeypatch.chdir(tmp_path)
    run("init", "--task", "gsm8k", "--agent", "mini", "--model", "autorl/tiny", "--budget", "2h", "--cluster", "mine")
    experiment = (tmp_path / "jobs" / "gsm8k-mini.yaml").read_text()
    spec = ExperimentSpec.model_validate(yaml.safe_load(experiment))
    assert (spec.matrix.driver, spec.cluster, len(spec.matrix.seed)) == (("llm",), "mine", 3)
    assert experiment.startswith("# yaml-language-server: $schema=")
    profile = yaml.safe_load((tmp_path / "jobs" / "clusters" / "mine.yaml").read_text())
    assert ClusterProfile.model_validate(profile).name == "mine"
    run("init", "--task", "gsm8k", "--agent", "mini", "--cluster", "mine", code=1)
    run("init", "--agent", "null", "--name", "nobody")
    spec = ExperimentSpec.model_validate(yaml.safe_load((tmp_path / "jobs" / "nobody.yaml").read_text()))
    assert spec.matrix.agent == ("null",)
    run("init", "--budget", "1:30", "--name", "odd", code=1)
    assert not (tmp_path / "jobs" / "odd.yaml").exists()
    assert (tmp_path / "jobs" / "gsm8k-mini.yaml").read_text() == experiment


def test_list_names_what_can_be_named(runs: Path) -> None:
    found = {
        what: json.loads(run("list", what, "--root", runs.parent, "--json").stdout)
        for what in ("tasks", "agents", "experiments")
    }
    assert {"gsm8k", "arithmetic"} <= {row["name"] for row in found["tasks"]}
    assert {"mini", "sft"} <= {row["name"] for row in found["agents"]}
    assert found["experiments"] == [{"name": "finished", "runs": 17, "finished": 17}]


def test_gc_frees_workspaces_of_closed_runs_alone(runs: Path, tmp_path: Path) -> None:
    """A workspace of a run that goes on, records, an artifact that somebody needs, and anything without --delete."""
    place = tmp_path / "runs"
    shutil.copytree(runs, place)
    experiment = place / "finished"
    closed, still = sorted(path.parent for path in experiment.glob("*/run.json"))[:2]
    (still / "ledger" / sorted(os.listdir(still / "ledger"))[-1]).unlink()  # its closing entry
    record = json.loads((experiment / "experiment.json").read_text())
    (experiment / "experiment.json").write_text(json.dumps({**record, "root": str(tmp_path), "scratch": None}))
    for link in experiment.glob("*/workspace.json"):
        link.unlink()
    scratch = tmp_path / "scratch" / "finished"
    for one in (closed, still):
        workspace = scratch / one.name
        workspace.mkdir(parents=True)
        (workspace / "file").write_bytes(b"x" * 5000)
        (one / "workspace.json").write_text(json.dumps({"schema_version": 1, "workspace": str(workspace)}))
    third = sorted(path.parent for path in experiment.glob("*/run.json"))[2]
    (third / "workspace.json").write_text(json.dumps({"schema_version": 1, "workspace": str(place)}))
    spare = experiment / "artifacts" / ("a" * 64)
    spare.mkdir(parents=True)
    before = sorted(path for path in place.rglob("*"))
    found = json.loads(run("gc", place, "--json").stdout)
    assert [Path(row["path"]).name for row in found["spare"]] == [closed.name] and found["bytes"] >= 5000
    assert (scratch / closed.name).is_dir()
    shutil.copytree(place, tmp_path / "copy" / "runs")
    assert json.loads(run("gc", tmp_path / "copy" / "runs", "--json").stdout)["spare"] == [], (
        "the original's workspaces"
    )
    run("gc", place, "--delete")
    assert not (scratch / closed.name).exists() and (scratch / still.name / "file").is_file()
    assert spare.is_dir(), "while a run goes on no artifact may go"
    assert sorted(path for path in place.rglob("*")) == before
    shutil.rmtree(still)
    assert json.loads(run("gc", place, "--json").stdout)["spare"] == [], "a run that is lost keeps all artifacts"


def test_each_event_is_told_once_and_by_the_users_own_file_alone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that others may write, a message for each job, an address in a log, and an error that ends a job."""
    from autorl_hpc_notify import after_job

    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "runs"
    shutil.copytree(runs, place)
    experiment = layout.ExperimentDir(place / "finished")
    after_job(experiment)  # no file: nobody is told
    file = tmp_path / ".config" / "autorl-hpc" / "notify.yaml"
    file.parent.mkdir(parents=True)
    said = tmp_path / "said"
    script = f'import os,sys; open({str(said)!r}, "a").write(os.environ["AUTORL_EVENT"] + " " + sys.stdin.read())'
    asked: dict[str, object] = {"command": [sys.executable, "-c", script], "webhook": "https://127.0.0.1:9/secret-word"}
    file.write_text(yaml.safe_dump(asked))
    file.chmod(0o666)
    after_job(experiment)
    assert not said.exists() and "nobody was told" in capfd.readouterr().out, "a file that others may write"
    file.chmod(0o600)
    after_job(experiment)
    after_job(experiment)
    assert (
        said.read_text().startswith("finished finished: 17 runs") and said.read_text().count("runs are finished") == 1
    )
    told = capfd.readouterr()
    assert "not told by webhook" in told.out and "secret-word" not in told.out + told.err
    closing = sorted((experiment.path / sorted(os.listdir(experiment.finished))[0] / "ledger").iterdir())[-1]
    closing.write_text(closing.read_text()[:-20])
    after_job(experiment)
    assert "failed finished: 1 of 17 runs were lost" in said.read_text()


# --- the leaderboard


def submission(who: str, day: int = 9) -> dict[str, object]:
    """The fields of a submission.yaml."""
    agent = {"name": "null-agent", "version": "1", "link": "https://example.org/agent"}
    facts = {"driver": "none", "hardware": "two cores", "licence": "MIT"}
    return {"submitter": who, "contact": "somebody@example.org", "date": f"2026-11-{day:02}", "agent": agent, **facts}


def bundles_of(runs: Path, folder: Path) -> list[Path]:
    """Bundles of the ten stored runs that kept their base model: the others' weights are not stored."""
    folder.mkdir()
    names = [
        path.parent.name
        for path in sorted(runs.glob("finished/*/run.json"))
        if "-null-" in path.parent.name or "-copycat-" in path.parent.name
    ]
    for name in names:
        run("export", runs / "finished" / name, "--out", folder / f"{name}.tar.gz")
    return sorted(folder.iterdir())


def altered(bundle: Path, target: Path) -> None:
    """The bundle with one score raised in its ledger, and every size and hash of the archive made to fit."""
    import gzip
    import hashlib
    import io

    with tarfile.open(bundle) as source:
        files = [(member, source.extractfile(member).read()) for member in source if member.isfile()]  # type: ignore[union-attr]
    changed = {}
    for member, data in files:
        if "/ledger/" in member.name and b'"kind":"closed"' in data:
            changed[member.name] = data.replace(b'"kind":"closed"', b'"kind":"closed" ')
        else:
            changed[member.name] = data
    head = json.loads(files[0][1])
    for row in head["files"]:
        row["size_bytes"], row["sha256"] = len(changed[row["path"]]), hashlib.sha256(changed[row["path"]]).hexdigest()
    changed[files[0][0].name] = (json.dumps(head, sort_keys=True, separators=(",", ":")) + "\n").encode()
    with gzip.open(target, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as out:
        for member, _ in files:
            member.size = len(changed[member.name])
            out.addfile(member, io.BytesIO(changed[member.name]))


def test_a_site_replaces_nothing_but_a_site(runs: Path, tmp_path: Path, submissions: Path) -> None:
    """`leaderboard build .` in the root removed all ledgers."""
    shutil.copytree(runs, tmp_path / "runs")
    run("leaderboard", "build", tmp_path, submissions, code=1)
    assert (
        sorted(path.name for path in (tmp_path / "runs" / "finished").glob("*/run.json"))
        and not (tmp_path / "index.html").exists()
    )


@pytest.fixture(scope="module")
def submissions(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty bundles of six people; eleven submissions of a seventh are bad, each in another way."""
    folder = tmp_path_factory.mktemp("submissions")
    made = bundles_of(runs, tmp_path_factory.mktemp("exported") / "b")
    for number, who in enumerate(("ada", "bob", "<script>alert(1)</script>", "dan", "eva", "fay")):
        home = folder / f"person-{number}"
        home.mkdir()
        (home / "submission.yaml").write_text(yaml.safe_dump(submission(who, number + 1)))
        for bundle in made[:5] if number % 2 else made[5:]:
            shutil.copy(bundle, home)
    good = submission("gus")
    bad: dict[str, dict[str, object]] = {
        "link": {**good, "agent": {"name": "x", "version": "1", "link": "javascript:alert(1)"}},
        "licence": {name: value for name, value in good.items() if name != "licence"},
        "future": {**good, "date": "2126-11-09"},
        "unknown": {**good, "rank": 1},
        "file-link": good,
        "fifo": good,
        "control": {**good, "hardware": "two\x1b[2Jcores"},
        **dict.fromkeys(("cut", "altered", "linked", "empty"), good),
    }
    for name, facts in bad.items():
        home = folder / f"bad-{name}"
        home.mkdir()
        (home / "submission.yaml").write_text(yaml.safe_dump(facts))
        if name == "cut":
            (home / "x.tar.gz").write_bytes(made[0].read_bytes()[:-2000])
        elif name == "altered":
            altered(made[0], home / "x.tar.gz")
        elif name == "linked":
            (home / "x.tar.gz").symlink_to(made[0])
        elif name == "fifo":
            os.mkfifo(home / "x.tar.gz")
        elif name != "empty":
            shutil.copy(made[0], home)
        if name == "file-link":
            secret = folder.parent / "secret-of-the-maintainer"
            secret.write_text("sk-secret-word: 1\n")
            (home / "submission.yaml").unlink()
            (home / "submission.yaml").symlink_to(secret)
    return folder


def test_bundles_are_reported_and_verified_as_folders_are(submissions: Path, tmp_path: Path) -> None:
    """A damaged bundle's number on a page, and weights that are left beside a report."""
    whole = sorted((submissions / "person-0").glob("*.tar.gz"))
    damaged = submissions / "bad-altered" / "x.tar.gz"
    told = json.loads(run("verify", *whole, damaged, "--json", code=1).stdout)
    assert [bool(one["problems"]) for one in told] == [*(False for _ in whole), True]
    run("verify", *whole)
    report = json.loads(run("report", *whole, damaged, "--out", tmp_path / "r", "--no-figures", "--json").stdout)
    assert len(report["runs"]) == len(whole) and not list((tmp_path / "r").rglob("*.safetensors"))
    assert {one["run_id"] for one in report["runs"]} == {path.name.removesuffix(".tar.gz") for path in whole}
    run("report", whole[0], submissions, "--out", tmp_path / "x", code=2)


def test_bad_submissions_are_told_apart(submissions: Path) -> None:
    told = {
        row["submission"]: row["problems"]
        for row in json.loads(run("check-submission", submissions, "--json", code=1).stdout)
    }
    assert {name for name, problems in told.items() if problems} == {name for name in told if name.startswith("bad-")}
    assert len(told) == 17
    words = {
        "link": "https://",
        "licence": "licence",
        "future": "future",
        "unknown": "rank",
        "linked": "link",
        "empty": "no bundle",
    }
    for name, word in words.items():
        assert any(word in problem for problem in told[f"bad-{name}"]), told[f"bad-{name}"]
    for name in ("cut", "altered"):
        assert told[f"bad-{name}"]


BUILD = ("--url", "https://example.org/board", "--verdicts")


@pytest.fixture(scope="module")
def verdicts(submissions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The maintainer's verdicts: one of the bytes that were judged, one of others; and a submitter's own, of all his bundles."""
    from autorl_hpc_leaderboard import bulk

    folder = tmp_path_factory.mktemp("verdicts")
    judged, exchanged = sorted((submissions / "person-0").glob("*.tar.gz"))[:2]
    facts: dict[str, object] = {"holds": True, "verdict": "", "selected": {"word": "identical"}}
    bulk.write_verdict(folder, judged, facts)
    bulk.write_verdict(folder, exchanged, {**facts, "selected": {"word": "of other bytes"}})
    path = bulk.verdict_path(folder, exchanged)
    path.write_text(path.read_text().replace(file_sha256(exchanged), "0" * 64))
    for bundle in (submissions / "person-1").glob("*.tar.gz"):
        bulk.write_verdict(
            submissions / "person-1" / "verdicts", bundle, {**facts, "selected": {"word": "my own word"}}
        )
    return folder


@pytest.fixture(scope="module")
def site(submissions: Path, verdicts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    run("leaderboard", "build", folder, submissions, *BUILD, verdicts, code=1)
    yield folder


def test_only_the_maintainers_verdicts_of_the_very_bytes_count(site: Path) -> None:
    """A submitter who brings a verdict with him, or exchanges the bundle behind one."""
    page = (site / "index.html").read_text()
    assert "identical" in page and "my own word" not in page and "of other bytes" not in page


def test_the_site_is_made_of_whole_submissions_and_holds_nothing_of_a_bundle(site: Path) -> None:
    """Text of a stranger that runs in a reader's browser, evidence or contacts that are published, links that lead nowhere."""
    page = (site / "index.html").read_text()
    assert (
        "<script>alert" not in page
        and "&lt;script&gt;" in page
        and "@example.org" not in page
        and "javascript:" not in page
        and "sk-secret-word" not in page
    )
    assert "ada" in page and "bad-altered" in page
    links = [part.split('"')[0] for part in page.split('href="')[1:]]
    assert all((site / link).is_file() for link in links if not link.startswith("https://"))
    kept = {path.name for path in (site / "runs").rglob("*") if path.is_file()}
    assert not list(site.glob(".work-*")) and kept <= {"run.html", "run.md", "summary.json", ".digest", "trace.html"}
    assert (site / "feed.xml").read_text().count("<entry>") == 6 and list((site / "badges").iterdir())


def test_building_again_changes_nothing_and_history_grows_by_changes(
    site: Path, submissions: Path, verdicts: Path
) -> None:
    before = {
        path: path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and path.name not in (".report", ".digest")
    }
    run("leaderboard", "build", site, submissions, *BUILD, verdicts, code=1)
    after = {
        path: path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and path.name not in (".report", ".digest")
    }
    assert before == after and json.loads((site / "history.json").read_text())


def test_verdicts_are_resumed_by_the_bytes_that_were_judged(tmp_path: Path) -> None:
    """A bundle that was exchanged behind its verdict keeps the verdict of another."""
    from autorl_hpc_leaderboard import bulk

    bundle, out = tmp_path / "a.tar.zst", tmp_path / "out"
    bundle.write_bytes(b"one")
    scored: list[bytes] = []

    def score(path: Path) -> dict[str, object]:
        scored.append(path.read_bytes())
        return {"holds": True, "verdict": "identical", "head": "0"}

    for data in (b"one", b"one", b"two"):
        bundle.write_bytes(data)
        assert bulk.rescore_here([bundle], out, score, lambda _: None)
    assert scored == [b"one", b"two"]


def test_an_extension_is_loaded_when_its_command_is_asked_for_and_no_sooner() -> None:
    """Every start loaded all of them; and one that does not load must not hide the core's commands."""
    found = entry_points(group="autorl_hpc.commands")
    script = "import sys; from typer.testing import CliRunner; from autorl_hpc import cli; CliRunner().invoke(cli.app, sys.argv[1:]); "
    script += 'print(sorted({name.partition(".")[0] for name in sys.modules if name.startswith("autorl_hpc_")}))'
    for words, loaded in ((["status", "--help"], []), (["notify", "--help"], ["autorl_hpc_notify"])):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(loaded)
    assert all(name in run("--help").output for name in found.names)


def test_one_that_does_not_load_is_reported_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoints([EntryPoint("broken", "no.such.module:app", "autorl_hpc.commands")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: broken)
    assert "status" in run("--help").output and run("broken", code=2)


def test_the_core_imports_no_extension_when_it_loads() -> None:
    package = layout.PACKAGE
    for path in package.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith(("import autorl_hpc_", "from autorl_hpc_")), f"{path}: {line}"

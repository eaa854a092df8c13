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

import numpy as np
import pytest
import yaml
from bundles import read_bundle, write_bundle
from treemaker import Tree, outcomes
from typer.testing import CliRunner, Result
from weights import write_safetensors

import autorl_hpc
from autorl_hpc import cli
from autorl_hpc.files import layout
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec

STORED = Path(__file__).resolve().parents[1] / "contract" / "experiments" / "finished.tar.xz"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("extensions")]  # one process makes the fixtures once


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def run_command(*words: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == code, f"{words}: {done.output}\n{done.exception!r}"
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment of five runs, as another machine left it."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as source:
        source.extractall(folder)
    experiment = folder / "runs" / "finished"
    record = json.loads((experiment / "experiment.json").read_text())
    record["runs"] = [one for one in record["runs"] if one.startswith("arithmetic-") and "-s0-" in one]
    for path in (*experiment.glob("*/run.json"), *(experiment / "finished").iterdir()):
        if (gone := path if path.name != "run.json" else path.parent).name not in record["runs"]:
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    (experiment / "experiment.json").write_text(json.dumps(record))
    return folder / "runs"


def test_frames_say_what_the_report_says(runs: Path, tmp_path: Path) -> None:
    """Rows that are lost or joined to another run, and a score that is not the mean of its items."""
    frames = autorl_hpc.load(runs)
    report = json.loads(run_command("report", runs, "--out", tmp_path, "--no-figures", "--json").stdout)
    told = {one["run_id"]: one for one in report["runs"]}
    assert set(frames.runs.run_id) == set(told)
    assert len(frames.submissions) == sum(len(one["trajectory"]) for one in told.values())
    for run_id, one in told.items():
        if one["task"] == "arithmetic" and one["selected"] is not None and "copycat" not in run_id:
            rows = frames.items.query("run_id == @run_id and split == 'report' and submission == @one['selected']")
            assert rows.outcome.mean() * 100 == pytest.approx(one["report"]["score"], abs=0.01)
    assert {"loss", "step", "more"} <= set(frames.training.columns) and len(frames.events)
    run_command("report", runs, "--out", tmp_path, "--no-figures", "--table", "--quiet")
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
    run_command(
        "init", "--task", "gsm8k", "--agent", "mini", "--model", "autorl/tiny", "--budget", "2h", "--cluster", "mine"
    )
    experiment = (tmp_path / "jobs" / "gsm8k-mini.yaml").read_text()
    spec = ExperimentSpec.model_validate(yaml.safe_load(experiment))
    assert (spec.matrix.driver, spec.cluster, len(spec.matrix.seed)) == (("llm",), "mine", 3)
    assert experiment.startswith("# yaml-language-server: $schema=")
    profile = yaml.safe_load((tmp_path / "jobs" / "clusters" / "mine.yaml").read_text())
    assert ClusterProfile.model_validate(profile).name == "mine"
    run_command("init", "--task", "gsm8k", "--agent", "mini", "--cluster", "mine", code=1)
    run_command("init", "--agent", "null", "--name", "nobody")
    spec = ExperimentSpec.model_validate(yaml.safe_load((tmp_path / "jobs" / "nobody.yaml").read_text()))
    assert spec.matrix.agent == ("null",)
    run_command("init", "--budget", "1:30", "--name", "odd", code=1)
    assert not (tmp_path / "jobs" / "odd.yaml").exists()
    assert (tmp_path / "jobs" / "gsm8k-mini.yaml").read_text() == experiment


def test_list_names_what_can_be_named(runs: Path) -> None:
    found = {
        what: json.loads(run_command("list", what, "--root", runs.parent, "--json").stdout)
        for what in ("tasks", "agents", "experiments")
    }
    assert {"gsm8k", "arithmetic"} <= {row["name"] for row in found["tasks"]}
    assert {"mini", "sft"} <= {row["name"] for row in found["agents"]}
    assert found["experiments"] == [{"name": "finished", "runs": 5, "finished": 5}]


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
    found = json.loads(run_command("gc", place, "--json").stdout)
    assert [Path(row["path"]).name for row in found["spare"]] == [closed.name] and found["bytes"] >= 5000
    assert (scratch / closed.name).is_dir()
    shutil.copytree(place, tmp_path / "copy" / "runs")
    assert json.loads(run_command("gc", tmp_path / "copy" / "runs", "--json").stdout)["spare"] == [], (
        "the original's workspaces"
    )
    run_command("gc", place, "--delete")
    assert not (scratch / closed.name).exists() and (scratch / still.name / "file").is_file()
    assert spare.is_dir(), "while a run goes on no artifact may go"
    assert sorted(path for path in place.rglob("*")) == before
    shutil.rmtree(still)
    assert json.loads(run_command("gc", place, "--json").stdout)["spare"] == [], (
        "a run that is lost keeps all artifacts"
    )


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
    assert said.read_text().startswith("finished finished: 5 runs") and said.read_text().count("runs are finished") == 1
    told = capfd.readouterr()
    assert "not told by webhook" in told.out and "secret-word" not in told.out + told.err
    closing = sorted((experiment.path / sorted(os.listdir(experiment.finished))[0] / "ledger").iterdir())[-1]
    closing.write_text(closing.read_text()[:-20])
    after_job(experiment)
    assert "failed finished: 1 of 5 runs were lost" in said.read_text()


# --- the leaderboard


def submission(who: str, day: int = 9) -> dict[str, object]:
    agent = {"name": "agent", "version": "1", "link": "https://example.org/agent"}
    facts = {"driver": "none", "hardware": "two cores", "licence": "MIT"}
    return {"submitter": who, "contact": "somebody@example.org", "date": f"2026-11-{day:02}", "agent": agent, **facts}


PEOPLE = ("ada", "bob", "<script>alert(1)</script>", "bob", "eva", "fay")


def bundles_of(place: Path, who: int) -> list[Path]:
    """Five bundles of one person's runs: three seeds of one agent that everybody has, which trained, and two that kept the base model."""
    tree, made = Tree(place / "exp"), []
    for seed in range(5):
        run = tree.run(seed=10 * who + seed, task="gsm8k", agent="sft" if seed < 3 else "null").start()
        if seed < 3:
            folder = tree.experiment.artifacts / "new"
            (folder / "refs").mkdir(parents=True)
            write_safetensors(folder / "w.safetensors", {"w": ("F32", np.full((2, 3), 7.0 * who + seed, np.float32))})
            (folder / "MANIFEST.json").write_text('{"not_in_hash": []}')
            content = folder.rename(tree.experiment.artifacts / folder_content_hash(folder)).name
            note = "sk-ant-api03-" + "abcDEF123456" * 4
            run.submit(10.0, outcomes(40, range(20)), content_hash=content, note=note)
        run.seal().close(outcomes(100, range(40 + 10 * who + seed)))
        made.append(place / f"run-{seed}.tar.zst")
        run_command("export", run.dir.path, "--out", made[-1])
    return made


@pytest.fixture(scope="module")
def submissions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty bundles of six people, the last of whom sends the first one's; thirteen submissions of a seventh are bad, each in another
    way."""
    folder, work = tmp_path_factory.mktemp("submissions"), tmp_path_factory.mktemp("exported")
    made: list[Path] = []
    for number, who in enumerate(PEOPLE):
        home = folder / f"person-{number}"
        home.mkdir()
        facts = {**submission(who, number + 1), "contact": f"somebody-{number}@example.org"}
        (home / "submission.yaml").write_text(yaml.safe_dump(facts))
        for bundle in bundles_of(work / str(number), number) if number < 5 else made:
            shutil.copy(bundle, home)
        made = sorted((folder / "person-0").glob("*.zst"))
    good, whole = submission("gus"), made[0]
    files = read_bundle(whole)
    head = json.loads(files["EVIDENCE.json"])
    (closing,) = (name for name, data in files.items() if "/ledger/" in name and b'"kind":"closed"' in data)
    altered = {**files, closing: files[closing].replace(b'"kind":"closed"', b'"kind":"closed" ')}
    without = {name: data for name, data in files.items() if "/artifacts/" not in name}
    bad: dict[str, dict[str, object]] = {
        "link": {**good, "agent": {"name": "x", "version": "1", "link": "javascript:alert(1)"}},
        "licence": {name: value for name, value in good.items() if name != "licence"},
        "future": {**good, "date": "2126-11-09"},
        "unknown": {**good, "rank": 1},
        "control": {**good, "hardware": "two\x1b[2Jcores"},
        **dict.fromkeys(("file-link", "fifo", "cut", "altered", "linked", "empty", "weightless", "false-head"), good),
    }
    for name, facts in bad.items():
        home = folder / f"bad-{name}"
        home.mkdir()
        (home / "submission.yaml").write_text(yaml.safe_dump(facts))
        target = home / "x.tar.zst"
        if name == "cut":
            target.write_bytes(whole.read_bytes()[:-2000])
        elif name == "altered":
            write_bundle(target, altered)
        elif name == "weightless":
            write_bundle(target, without, weights=None)
        elif name == "false-head":
            write_bundle(target, files, head={**head["head"], "head": "0" * 64})
        elif name == "linked":
            target.symlink_to(whole)
        elif name == "fifo":
            os.mkfifo(target)
        elif name != "empty":
            shutil.copy(whole, target)
        if name == "file-link":
            secret = folder.parent / "secret-of-the-maintainer"
            secret.write_text("sk-secret-word: 1\n")
            (home / "submission.yaml").unlink()
            (home / "submission.yaml").symlink_to(secret)
    return folder


def test_bundles_are_reported_and_verified_as_folders_are(submissions: Path, tmp_path: Path) -> None:
    """A damaged bundle's number on a page, and weights that are left beside a report."""
    whole = sorted((submissions / "person-0").glob("*.zst"))
    damaged = [submissions / f"bad-{name}" / "x.tar.zst" for name in ("altered", "weightless", "false-head")]
    told = json.loads(run_command("verify", *whole, *damaged, "--json", code=1).stdout)
    assert [bool(one["problems"]) for one in told] == [*(False for _ in whole), *(True for _ in damaged)]
    run_command("verify", *whole)
    report = run_command("report", *whole, *damaged, "--out", tmp_path / "r", "--no-figures", "--json").stdout
    assert len(json.loads(report)["runs"]) == len(whole) and not list((tmp_path / "r").rglob("*.safetensors"))
    run_command("report", whole[0], submissions, "--out", tmp_path / "x", code=2)


def test_bad_submissions_are_told_apart(submissions: Path) -> None:
    told = json.loads(run_command("check-submission", submissions, "--json", code=1).stdout)
    problems = {row["submission"]: " ".join(row["problems"]) for row in told}
    assert {name for name, what in problems.items() if what} == {n for n in problems if n.startswith("bad-")}
    assert len(problems) == 19 and sum(row["bundles"] for row in told if not row["problems"]) == 30
    words = {"link": "https://", "licence": "licence", "future": "future", "unknown": "rank", "linked": "link"}
    words |= {"empty": "no bundle", "weightless": "the bundle holds None", "false-head": "names another head"}
    for name, word in words.items():
        assert word in problems[f"bad-{name}"]


BUILD = ("--url", "https://example.org/board", "--verdicts")


@pytest.fixture(scope="module")
def verdicts(submissions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The maintainer's verdicts: two that hold, one that doesn't, one of other bytes, one that can't be read; and a submitter's own."""
    from autorl_hpc_leaderboard import bulk

    folder = tmp_path_factory.mktemp("verdicts")
    mine = sorted((submissions / "person-0").glob("*.zst"))
    facts: dict[str, object] = {"holds": True, "verdict": "", "selected": {"word": "identical"}}
    for bundle in mine[:3]:
        bulk.write_verdict(folder, bundle, facts)
    path = bulk.verdict_path(folder, mine[1])
    path.write_text(path.read_text().replace("identical", "of other bytes").replace(path.stem, "0" * 64))
    bulk.verdict_path(folder, mine[2]).write_text("{")
    assert bulk.open_bundles([*mine, mine[3]], folder) == mine[1:], "each content once"
    theirs = submissions / "person-1"
    bulk.write_verdict(folder, theirs / "run-0.tar.zst", {**facts, "holds": False, "selected": {"word": "differs"}})
    older = {**facts, "holds": False, "older": True, "selected": {"word": "older version"}}
    bulk.write_verdict(folder, submissions / "person-4" / "run-0.tar.zst", older)
    for bundle in theirs.glob("*.zst"):
        bulk.write_verdict(theirs / "verdicts", bundle, {**facts, "selected": {"word": "my own word"}})
    return folder


@pytest.fixture(scope="module")
def site(submissions: Path, verdicts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run_command("leaderboard", "build", folder, submissions, *BUILD, verdicts, code=1)
    return folder


def rows_of(page: str) -> dict[str, str]:
    cells = [row.split("<td>") for row in page.split("<h2>Submissions", maxsplit=1)[0].split("<tr>")[2:]]
    return {row[3].removesuffix("</td>"): " ".join(row) for row in cells}


def test_each_submitters_agent_is_a_row_and_only_the_maintainers_verdicts_count(site: Path) -> None:
    """A submitter who brings a verdict with him, exchanges the bundle behind one, sends another's runs, or has the same agent."""
    page = (site / "index.html").read_text()
    assert "identical" in page and "my own word" not in page and "of other bytes" not in page
    rows = rows_of(page)
    assert {f"{agent} by {who}" for agent in ("sft", "null") for who in ("ada", "bob", "bob (2)", "eva")} < set(rows)
    assert len(rows) == 10 and not any("fay" in name for name in rows) and "<td>fay</td>" in page
    assert "does not hold" in rows["sft by bob"] and "#" not in rows["sft by bob"] and "#1" in rows["sft by eva"]
    assert "older version" in rows["sft by eva"], "nothing speaks against it"
    report = json.loads((site / "report" / "summary.json").read_text())
    assert {run["agent"] for run in report["runs"]} >= {"sft by ada", "sft by bob"}, "both pages say the same"


def test_the_site_is_made_of_whole_submissions_and_holds_nothing_of_a_bundle(site: Path) -> None:
    """Text of a stranger that runs in a reader's browser, secrets of an agent's notes, evidence, traces or contacts that are published,
    links that lead nowhere."""
    page = (site / "index.html").read_text()
    assert "&lt;script&gt;" in page and "ada" in page and "bad-altered" in page
    everything = "".join(path.read_text(errors="replace") for path in site.rglob("*") if path.is_file())
    for word in ("somebody-", "somebody@", "javascript:alert", "sk-secret-word", "sk-ant-api03-abc"):
        assert word not in everything, word
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".svg", ".xml")]
    assert not any("<script>alert" in path.read_text() for path in pages)
    links = [part.split('"')[0] for part in page.split('href="')[1:]]
    assert all((site / link).is_file() for link in links if not link.startswith("https://"))
    kept = {path.name for path in (site / "runs").rglob("*") if path.is_file()}
    assert not list(site.glob(".work-*")) and kept <= {"run.html", "run.md", "summary.json", ".digest"}
    assert (site / "feed.xml").read_text().count("<entry>") == 6 and len(list((site / "badges").iterdir())) == 10


def test_building_again_changes_nothing_and_replaces_nothing_but_a_site(
    site: Path, submissions: Path, verdicts: Path, tmp_path: Path
) -> None:
    """`leaderboard build .` in the root removed all ledgers."""

    def files() -> dict[Path, bytes]:
        kept = (path for path in site.rglob("*") if path.is_file() and path.name not in (".report", ".digest"))
        return {path: path.read_bytes() for path in kept}

    before = files()
    run_command("leaderboard", "build", site, submissions, *BUILD, verdicts, code=1)
    assert before == files() and json.loads((site / "history.json").read_text())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.json").touch()
    run_command("leaderboard", "build", tmp_path, submissions, code=1)
    assert (tmp_path / "runs" / "run.json").exists() and not (tmp_path / "index.html").exists()


def test_verdicts_are_resumed_by_the_bytes_that_were_judged(tmp_path: Path) -> None:
    """A bundle that was exchanged behind its verdict keeps the verdict of another; two people's bundles of one name meet."""
    from autorl_hpc_leaderboard import bulk

    one, two, out = tmp_path / "a" / "run.tar.zst", tmp_path / "b" / "run.tar.zst", tmp_path / "out"
    scored: list[bytes] = []

    def score(path: Path) -> dict[str, object]:
        scored.append(path.read_bytes())
        return {"holds": True, "verdict": "identical", "head": "0"}

    for first, second in ((b"one", b"two"), (b"one", b"two"), (b"three", b"one")):
        for path, data in ((one, first), (two, second)):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        assert bulk.rescore_here([one, two], out, score, lambda _: None)
    assert scored == [b"one", b"two", b"three"]


def test_an_extension_is_loaded_when_its_command_is_asked_for_and_no_sooner() -> None:
    """Every start loaded all of them; and one that does not load must not hide the core's commands."""
    found = entry_points(group="autorl_hpc.commands")
    script = "import sys; from typer.testing import CliRunner; from autorl_hpc import cli; CliRunner().invoke(cli.app, sys.argv[1:]); "
    script += 'print(sorted({name.partition(".")[0] for name in sys.modules if name.startswith("autorl_hpc_")}))'
    for words, loaded in ((["status", "--help"], []), (["notify", "--help"], ["autorl_hpc_notify"])):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(loaded)
    assert all(name in run_command("--help").output for name in found.names)


def test_one_that_does_not_load_is_reported_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoints([EntryPoint("broken", "no.such.module:app", "autorl_hpc.commands")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: broken)
    assert "status" in run_command("--help").output and run_command("broken", code=2)


def test_the_core_imports_no_extension_when_it_loads() -> None:
    package = layout.PACKAGE
    for path in package.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith(("import autorl_hpc_", "from autorl_hpc_")), f"{path}: {line}"

"""Records: what is written is read back, a mistake is named by file and field, the published schemas are current."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autorl_hpc.agents import AgentFile, load_agent
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.driver_log import DriverCall
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records import cluster, driver, evidence, exchange, experiment, ledger, recorded, run, task
from autorl_hpc.records.base import NewerVersion, Strict, parse_record
from autorl_hpc.records.canonical import canonical_json, readable_json
from autorl_hpc.records.names import is_name, printable
from autorl_hpc.records.schemas import FILES, schemas
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network, Protocol, QueueKind, SandboxLevel, Split
from autorl_hpc.tasks.loader import load_task

REPO = Path(__file__).resolve().parents[2]
SCHEMAS = REPO / "docs" / "schemas"
HASH = "0123456789abcdef" * 4

RECIPE = task.Recipe(
    name="default",
    version=1,
    prompt="{question}",
    sampling=task.Sampling(max_new_tokens=32, stop=("\n",)),
    scorer="gsm8k",
    scorer_version="1",
)
PIN = task.SplitPin(n=3, sha256=HASH)
SCIENCE = run.Science(
    task="arithmetic",
    agent="null",
    driver="none",
    base_model="autorl/tiny",
    mode="free",
    seed=3,
    budget=experiment.Budget(wall_clock_s=60.0),
    protocol=Protocol.TWO_SPLIT,
    recipe=RECIPE,
    splits={"feedback": PIN, "report": PIN},
    base_model_content_hash=HASH,
)
SPEC = experiment.ExperimentSpec(
    name="exp",
    matrix=experiment.Matrix(task=("arithmetic",), agent=("null", "sft"), base_model=("autorl/tiny",), seed=(0, 1)),
    exclude=({"agent": "sft", "seed": [1]},),
    budget=experiment.Budget(wall_clock_s=90.0),
    recipe={"arithmetic": "default"},
)
SEEN: dict[str, Any] = {"elapsed_s": 12.0, "at": "2026-01-01T00:00:00.000+00:00"}
EVALUATION = ledger.Evaluation(
    split=Split.FEEDBACK, content_hash=HASH, score=12.5, n=8, correct=1, recipe_hash=HASH, engine_hash=HASH
)
HEADS = evidence.Heads(experiment="exp", runs=(evidence.RunHead(run_id="a", entries=3, head=HASH),))
RECORDS: list[Strict] = [
    exchange.Manifest(model_path="output/v1 é 漢", id="v1", note="a note", final=True),
    SPEC,
    run.RunRecord(
        run_id=SCIENCE.run_id(),
        experiment="exp",
        index=0,
        science=SCIENCE,
        recipe_hash=RECIPE.hash(),
        task_hash=HASH,
        agent_hash=HASH,
        code_hash=HASH,
        created_at="2026-01-01T00:00:00.000+00:00",
    ),
    run.ExperimentRecord(
        spec=SPEC,
        spec_sha256=HASH,
        root="root",
        code_hash=HASH,
        created_at="now",
        runs=("a", "b"),
        grader=experiment.GraderSpec(device="cpu"),
        host={"name": "node1"},
    ),
    cluster.ClusterProfile(
        name="site",
        partition="gpu",
        setup="source x\nexport Y=1",
        sbatch={"mail-type": "END", "exclusive": True},
        container=cluster.Container(image="$HOME/a.sif"),
        limits=cluster.Limits(max_time="2d"),
        agent=cluster.JobKind(gpus=2, memory="64G"),
    ),
    cluster.SlurmJobs(
        uid="0123456789ab",
        cluster="site",
        submitted=(cluster.Submitted(name="exp.agents-1.0", role="agents", runs=("a",), number=1, job_id="12"),),
    ),
    cluster.SeenJobs(
        counter=2, jobs=(cluster.SeenJob(name="exp.agents-1.0", job_id="12_0", index=0, state="RUNNING"),)
    ),
    ledger.Entry(
        seq=1,
        prev=HASH,
        kind=EntryKind.SCORE,
        at="now",
        writer=ledger.Writer(role="grader", host="node1", pid=1),
        body={"a": [1, 2.5, None, {"b": True}]},
    ),
    HEADS,
    evidence.Anchor(heads=HEADS, made_at="now", hmac_sha256=HASH),
    evidence.EvidenceManifest(
        tool_version="1",
        run_id="a",
        experiment="exp",
        head=HEADS.runs[0],
        base_model="org/model",
        base_model_content_hash=HASH,
        weights=evidence.ExportedWeights(submission_id=1, content_hash=HASH, not_in_hash=("lm_head.weight",)),
        emptied=("root",),
        files=(exchange.StoreFile(path="experiment/experiment.json", sha256=HASH, size_bytes=1),),
    ),
    ledger.AttemptStarted(attempt=1, elapsed_s=0.0, workspace="w"),
    ledger.AttemptEnded(attempt=1, elapsed_s=1.5, reason="signal 15"),
    ledger.Submission(
        submission_id=1,
        manifest_id="v1",
        status="accepted",
        model_path="output/v1",
        elapsed_s=0.1 + 0.2,
        content_hash=HASH,
        ignored_files=("optimizer.pt", "logs/"),
    ),
    ledger.Score(submission_id=1, evaluation=EVALUATION, grader="g", generation=2),
    ledger.SandboxUsed(
        attempt=1,
        level=SandboxLevel.BWRAP,
        network=Network.NONE,
        holes=("h",),
        start_s=0.1,
        refused={"apptainer": "no"},
    ),
    ledger.Fingerprint(submission_id=1, content_hash=HASH, flags=("untrained_copy",), relative_delta=1e-9, parent=None),
    ledger.Contamination(
        submission_id=3,
        also=(2,),
        items={Split.FEEDBACK: 0, Split.REPORT: 2},
        whole={Split.FEEDBACK: 0, Split.REPORT: 1},
        of={Split.FEEDBACK: 300, Split.REPORT: 500},
        found=(
            ledger.Contaminated(file="code/x.py", split=Split.REPORT, how="ngram", items=2, first_items=("r-1", "r-2")),
        ),
        complete=False,
        reason="limit of the look: time",
    ),
    ledger.Sealed(submissions=(1, 3), ended_by=EndedBy.BUDGET, exit_code=None, elapsed_s=60.0, given_back_s=1.0),
    ledger.Sealed(
        submissions=(),
        ended_by=EndedBy.TOKENS,
        exit_code=None,
        elapsed_s=60.0,
        given_back_s=1.0,
        gpu_hours=0.5,
        driver=ledger.DriverUse(tokens_in=10, tokens_out=1, tokens_cached=4, cost_usd=0.25, calls=1, refused=2),
        exit_codes=(0, None),
        reprompts=1,
    ),
    ledger.Closed(selected=None, selected_by="base_kept", fault=Fault.AGENT, reason="no submission", grader="g"),
    exchange.QueueEntry(
        kind=QueueKind.BASELINE, task="arithmetic", base_model="autorl/tiny", recipe_hash=HASH, split=Split.REPORT
    ),
    exchange.Claim(entry="f-run--000001", generation=1, grader="g", host="node1", pid=1),
    exchange.Heartbeat(grader="g", host="node1", pid=1, counter=10**12, state="idle"),
    driver.DriverEndpoint(
        name="local",
        url="http://node1:40001/v1",
        model="org/m",
        generation=2,
        host="node1",
        pid=1,
        state="ready",
        counter=7,
    ),
    exchange.Trouble(entry="f-run--000001", failures=3, fault=Fault.GRADER, problem="no key", grader="g"),
    exchange.Clock(attempt=1, elapsed_s=1e-9, host="node1", pid=1),
    exchange.Clock(
        attempt=2,
        elapsed_s=60.0,
        gpus=2,
        gpu_s=120.0,
        progress=exchange.Progress(
            exit_codes=(None, 0),
            warnings=(exchange.BudgetWarning(budget="tokens", percent=100, elapsed_s=59.5, says="used up"),),
            out_of=EndedBy.TOKENS,
            out_at_s=59.5,
        ),
        host="node1",
        pid=1,
    ),
    exchange.Baseline(
        key=HASH,
        task="arithmetic",
        base_model="autorl/tiny",
        evaluation=EVALUATION,
        repeat_score=12.0,
        engine=exchange.Engine(backend="transformers", versions={"torch": "2"}, device="cpu", dtype="float32"),
        grader="g",
    ),
    exchange.StoreManifest(
        name="autorl/tiny",
        kind="model",
        source="here",
        files=(exchange.StoreFile(path="a", sha256=HASH, size_bytes=1),),
    ),
    exchange.EnvironmentPointer(name="torch", content_hash=HASH),
    exchange.BundleManifest(
        parts=(
            exchange.BundlePart(name="autorl/tiny", kind="model", content_hash=HASH),
            exchange.BundlePart(
                name="torch",
                kind="environment",
                content_hash=HASH,
                environment=exchange.EnvironmentFacts(kind="venv", python="cp311-linux-x86_64"),
            ),
        ),
        files=(exchange.StoreFile(path="store/models/autorl/tiny/config.json", sha256=HASH, size_bytes=1),),
    ),
    task.TaskFile(
        name="t",
        title="T",
        source="s",
        licence="MIT",
        sources=(task.SourceFile(file="a.jsonl", sha256=HASH),),
        train_files={"train/a": HASH},
        splits={"feedback": PIN, "report": PIN},
        recipes=(RECIPE,),
    ),
    AgentFile(name="a", description="d", include=("scripted",), needs=("torch",), trace="codex"),
    recorded.TraceEvent(**SEEN, kind="usage", source="agent.log", offset=0, format="codex", tokens_in=3, tokens_out=1),
    recorded.TraceEvent(**SEEN, kind="position", source="agent.log", offset=7, format="", skipped=2),
    recorded.TraceEvent(
        **SEEN, kind="tool_result", source="a.traj.json", offset=4, format="mini", session="s", duration_s=1.5, ok=False
    ),
    recorded.UsageSample(**SEEN, cpu_s=1.5, gpus=(recorded.GpuSample(index=0, used_share=0.5),)),
    recorded.ProcessSeen(
        **SEEN, pid=7, parent=1, what="ended", command="python code/train.py", began_s=1.0, exit_code=-9
    ),
    recorded.TrainingPoint(
        **SEEN, source="agent.log", trainer="GRPOTrainer", step=5, reward=0.5, more={"entropy": 0.1}
    ),
    recorded.CodeRevision(**SEEN, revision=HASH[:40], submission_id=1, files=2, changed=1),
]


def named(record: Strict) -> str:
    return type(record).__name__


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_what_is_written_is_read_back(record: Strict, tmp_path: Path) -> None:
    for data in (record.canonical(), readable_json(record.model_dump(mode="json"))):
        again = parse_record(type(record), json.loads(data), "file")
        assert again == record
        assert again.canonical() == record.canonical() and again.digest() == record.digest()


def test_every_record_has_an_example_here() -> None:
    assert {type(record) for record in RECORDS} == {*FILES, AgentFile}


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_an_unknown_field_is_named_with_its_file_and_a_suggestion(record: Strict) -> None:
    value = record.model_dump(mode="json")
    known = sorted(value)[-1]
    misspelt = known[:-1] + "x" + known[-1]
    value[misspelt] = value.pop(known)
    with pytest.raises(AutorlError) as caught:
        parse_record(type(record), value, "the/file.json")
    assert caught.value.where == "the/file.json"
    assert f"field `{misspelt}`: unknown field; did you mean `{known}`?" in caught.value.what
    assert caught.value.next_step


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_each_missing_field_is_named(record: Strict) -> None:
    required = [name for name, field in type(record).model_fields.items() if field.is_required()]
    assert required or isinstance(record, ledger.Contamination)
    for name in required:
        value = record.model_dump(mode="json")
        del value[name]
        with pytest.raises(AutorlError, match=f"field `{name}`: this field is missing"):
            parse_record(type(record), value, "file")


@pytest.mark.parametrize("value", [None, [], "text", 3, [1, 2]])
def test_a_file_that_holds_no_object_is_named_whole(value: Any) -> None:
    with pytest.raises(AutorlError, match=r"\(the whole file\)"):
        parse_record(exchange.Manifest, value, "file")


@pytest.mark.parametrize("record", [r for r in RECORDS if "schema_version" in type(r).model_fields], ids=named)
def test_a_newer_version_is_refused_politely(record: Strict) -> None:
    value = {**record.model_dump(mode="json"), "schema_version": 2, "field_of_the_future": 1}
    with pytest.raises(NewerVersion, match="newer autorl-hpc") as caught:
        parse_record(type(record), value, "the/file.json")
    assert caught.value.where == "the/file.json" and "newer autorl-hpc" in (caught.value.next_step or "")
    for wrong in ("2", 2.0, 0, -1):
        with pytest.raises(AutorlError, match="schema_version"):
            parse_record(type(record), {**record.model_dump(mode="json"), "schema_version": wrong}, "file")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_no_numbers(number: float) -> None:
    value = {**EVALUATION.model_dump(mode="json"), "score": number}
    with pytest.raises(AutorlError, match="field `score`"):
        parse_record(ledger.Evaluation, value, "file")
    with pytest.raises(ValueError):
        canonical_json({"score": number})


@pytest.mark.parametrize("score", [-0.001, 100.001, "high", [1]])
def test_a_score_lies_between_0_and_100(score: Any) -> None:
    with pytest.raises(AutorlError, match="field `score`"):
        parse_record(ledger.Evaluation, {**EVALUATION.model_dump(mode="json"), "score": score}, "file")


def test_canonical_bytes_don_t_depend_on_the_order_of_fields() -> None:
    assert (
        canonical_json({"b": 1, "a": [1.0, "é"]})
        == canonical_json({"a": [1.0, "é"], "b": 1})
        == '{"a":[1.0,"é"],"b":1}'.encode()
    )


def test_records_can_t_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EVALUATION.score = 100.0  # type: ignore[misc]


def test_the_run_id_changes_with_science_and_with_nothing_else() -> None:
    assert SCIENCE.run_id().startswith("arithmetic-null-tiny-free-s3-")
    ids = {
        SCIENCE.run_id(),
        SCIENCE.model_copy(update={"seed": 4}).run_id()[-8:],
        SCIENCE.model_copy(update={"base_model_content_hash": "f" * 64}).run_id()[-8:],
        SCIENCE.model_copy(update={"budget": experiment.Budget(wall_clock_s=61.0)}).run_id()[-8:],
        SCIENCE.model_copy(update={"recipe": RECIPE.model_copy(update={"prompt": "x"})}).run_id()[-8:],
        SCIENCE.model_copy(update={"environment_hash": HASH}).run_id()[-8:],
    }
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("20m", 1200.0),
        ("1h30m", 5400.0),
        (" 2 D ", 172800.0),
        ("0.5h", 1800.0),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert experiment.Budget.model_validate({"wall_clock": text}).wall_clock_s == seconds


def test_names_are_safe_as_file_names() -> None:
    assert all(is_name(name) for name in ("v1", "a.b-c_D", "0", "x" * 64))
    assert not any(is_name(name) for name in ("", ".a", "-a", "a/b", "a..b", "a\n", "a b", "é", "x" * 65, "a\x00"))


def test_printable_text_holds_no_control_and_no_broken_characters() -> None:
    shown = printable("é漢 \x1b[2J\n\udcff\u202e\x00")
    assert shown == "é漢 \\x1b[2J\\n\\udcff\\u202e\\x00"
    shown.encode()


def test_the_published_schemas_are_current() -> None:
    """Run `bin/schemas` after a record was changed."""
    wanted = {name: readable_json(schema) for name, schema in schemas(AgentFile, DriverCall).items()}
    assert {path.stem: path.read_bytes() for path in SCHEMAS.glob("*.json")} == wanted


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_the_schemas_describe_what_is_written(record: Strict) -> None:
    schema = json.loads((SCHEMAS / f"{named(record)}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    value = record.model_dump(mode="json")
    validator.validate(value)
    assert not validator.is_valid({**value, "no_such_field": 1})
    if "schema_version" in value:
        assert not validator.is_valid({**value, "schema_version": 2})


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
def test_the_schemas_describe_the_shipped_tasks(name: str) -> None:
    schema = json.loads((SCHEMAS / "TaskFile.json").read_text())
    jsonschema.validate(read_yaml(load_task(name).folder / "task.yaml"), schema)


@pytest.mark.parametrize("path", sorted((REPO / "jobs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_shipped_experiments_are_read(path: Path) -> None:
    spec = parse_record(experiment.ExperimentSpec, read_yaml(path), path)
    assert spec.budget.wall_clock_s > 0


@pytest.mark.parametrize(
    "path", sorted((share("templates") / "agents").glob("*/agent.yaml")), ids=lambda p: p.parent.name
)
def test_the_shipped_agents_are_read(path: Path) -> None:
    assert load_agent(path.parent.name).name == path.parent.name


def test_run_ids_from_before_drivers_stay_and_each_new_field_makes_another_run() -> None:
    assert SCIENCE.run_id() == "arithmetic-null-tiny-free-s3-c563477e", (
        "what was launched before would be launched anew"
    )
    answers = driver.DriverSpec(kind="api", url="https://h:8443/v1", model="m", parameters={"temperature": 0.5})
    budget = {"wall_clock_s": 60.0}
    others: list[dict[str, Any]] = [
        {"reprompts": 2},
        {"driver_spec": answers.science(None)},
        {"driver_spec": answers.model_copy(update={"parameters": {"temperature": 0.6}}).science(None)},
        {"driver_spec": answers.model_copy(update={"url": "https://h:8444/v1"}).science(None)},
        *(
            {"budget": experiment.Budget(**budget, **more)}
            for more in ({"tokens": 5}, {"cost_usd": 1}, {"gpu_hours": 1}, {"grace": 0})
        ),
    ]
    ids = {SCIENCE.model_copy(update=other).run_id() for other in others}
    assert len(ids) == len(others) and SCIENCE.run_id() not in ids
    faster = driver.DriverSpec(kind="vllm", model="o/m", args=("--max-num-seqs=8", "--dtype", "half"), gpus=2)
    assert faster.science(HASH) == faster.model_copy(update={"args": ("--dtype=half",), "gpus": 4}).science(HASH)
    assert faster.science(HASH) != faster.model_copy(update={"args": ("--dtype=float",)}).science(HASH)


def test_the_last_grace_is_a_twentieth_of_the_wall_clock_at_most() -> None:
    assert experiment.Budget(wall_clock_s=60.0).last_grace_s == 3.0
    assert experiment.Budget(wall_clock="2h").last_grace_s == 60.0
    assert experiment.Budget(wall_clock="2h", grace=0).last_grace_s == 0.0


@pytest.mark.parametrize("value", [{"kind": "api", "url": "http://h/v1"}, {"kind": "vllm", "args": ["--dtype=half"]}])
def test_a_driver_is_read_back_with_its_defaults(value: dict[str, Any]) -> None:
    spec = driver.DriverSpec.model_validate({"model": "m", **value})
    assert driver.DriverSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_what_tokens_cost() -> None:
    priced = driver.DriverSpec(kind="vllm", model="m", price_in=2.0, price_out=10.0, price_cached=0.5)
    assert priced.cost_usd(1_000_000, 100_000, 500_000) == 1.0 + 0.25 + 1.0
    assert priced.dearest_usd(1_000_000) == 10.0
    assert driver.DriverSpec(kind="vllm", model="m").cost_usd(1, 1) is None
    for half in ({"price_in": 2.0}, {"price_out": 2.0}):
        assert driver.DriverSpec(kind="vllm", model="m", **half).dearest_usd(1_000_000) is None
    assert driver.DriverSpec(kind="vllm", model="m", price_in=0, price_out=0).dearest_usd(1) == 0.0

"""A wrong experiment is refused before anything is made: the message names file, field, and what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.launch.plan import prepare
from autorl_hpc.states import Fault

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def root(staged: Path, tmp_path: Path) -> Root:
    """A staged root of the test's own."""
    made = Root(tmp_path / "root")
    made.path.mkdir()
    for part in ("store", "vault"):
        shutil.copytree(staged / part, made.path / part)
    return made


@pytest.fixture(scope="module")
def clean(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A staged root in which nothing is ever made."""
    made = Root(tmp_path_factory.mktemp("clean"))
    for part in ("store", "vault"):
        shutil.copytree(staged / part, made.path / part)
    return made


def spec() -> dict[str, Any]:
    return {
        "name": "exp",
        "matrix": {"task": ["arithmetic"], "agent": ["null", "sft"], "base_model": "autorl/tiny", "seed": [0, 1]},
        "budget": {"wall_clock": "1h"},
    }


def refused(root: Root, content: bytes | dict[str, Any]) -> AutorlError:
    """The error of launching this experiment, after it was seen that nothing was made."""
    path = root.path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    before = sorted(str(p) for p in root.path.rglob("*"))
    with pytest.raises(AutorlError) as caught:
        prepare(path, root)
    assert sorted(str(p) for p in root.path.rglob("*")) == before, "something was made"
    assert not root.runs.exists()
    assert caught.value.where and caught.value.next_step, f"no place or no next step: {caught.value}"
    return caught.value


def test_the_experiment_that_the_others_are_made_from_is_right(root: Root) -> None:
    path = root.path / "job.yaml"
    path.write_text(yaml.safe_dump(spec()))
    planned, record = prepare(path, root)
    assert len(planned.cells) == len(record.runs) == 4
    assert all((planned.experiment.run(run).record).is_file() for run in record.runs)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("wall_clock: 1h", "wall_clock: 1:30", "in line 1, column 22: `1:30` is 90 in YAML; write what is meant: 1m30s or 1h30m"),
        ("wall_clock: 1h", "wall_clock: 12:00:00", "`12:00:00` is 43200 in YAML"),
        ("wall_clock: 1h", "wall_clock: 1:30.5", "`1:30.5` is 90.5 in YAML"),
        ("seed: [0, 1]", "seed: 010", "`010` is 8 in YAML; write what is meant: 10 or 8"),
        ("seed: [0, 1]", "seed: [-010]", "`-010` is -8 in YAML"),
        ("wall_clock: 1h", "wall_clock: 1h, max_submissions: 0_10", "`0_10` is 8 in YAML; write what is meant: 10 or 8"),
        ("wall_clock: 1h", "wall_clock: 1h, max_submissions: 0x10", "`0x10` is 16 in YAML; write what is meant: 16"),
        ("wall_clock: 1h", "wall_clock: 1h, max_submissions: 0b11", "`0b11` is 3 in YAML"),
        ("wall_clock: 1h", "wall_clock: 01.5", "`01.5` is 1.5 in YAML; write what is meant: 1.5, or a text in quotes"),
        ("wall_clock: 1h", "wall_clock: -1:30:00", "`-1:30:00` is -5400 in YAML"),
        ("seed: [0, 1]", "seed: yes", "`yes` is true in YAML; write what is meant: true, or a text in quotes"),
        ("name: exp", "name: no", "`no` is false in YAML; write what is meant: false, or a text in quotes"),
        ("name: exp", "name: On", "`On` is true in YAML"),
        ("name: exp", "name: exp\noff: 1", "`off` is false in YAML"),
    ],
)  # fmt: skip
def test_a_value_that_yaml_reads_unlike_a_person_is_asked_about(root: Root, old: str, new: str, words: str) -> None:
    """`1:30` was 90 seconds, `010` was 8 and a name `no` was false, without a word."""
    text = yaml.safe_dump(spec(), default_flow_style=None)
    assert old in text
    assert words in refused(root, text.replace(old, new).encode()).what


def put(*keys: str, value: Any) -> Change:
    """A change of one field."""

    def change(made: dict[str, Any]) -> None:
        for key in keys[:-1]:
            made = made.setdefault(key, {})
        made[keys[-1]] = value

    return change


def rename(*keys: str, to: str) -> Change:
    """Another name for one field."""

    def change(made: dict[str, Any]) -> None:
        for key in keys[:-1]:
            made = made[key]
        made[to] = made.pop(keys[-1])

    return change


def drop(*keys: str) -> Change:
    """One field taken away."""

    def change(made: dict[str, Any]) -> None:
        for key in keys[:-1]:
            made = made[key]
        del made[keys[-1]]

    return change


def both(*changes: Change) -> Change:
    """All of these changes."""

    def change(made: dict[str, Any]) -> None:
        for each in changes:
            each(made)

    return change


API = {"kind": "api", "url": "https://api.example.org/v1", "model": "m"}
VLLM = {"kind": "vllm", "model": "autorl/tiny"}

FIELDS: list[tuple[str, Change, list[str]]] = [
    ("unknown task", put("matrix", "task", value="arithmetik"), ["field `matrix.task`", "no task `arithmetik`", "did you mean `arithmetic`?"]),
    ("unknown agent", put("matrix", "agent", value=["null", "stf"]), ["field `matrix.agent`", "no agent `stf`"]),
    ("path as task", put("matrix", "task", value="../arithmetic"), ["field `matrix.task.0`", "../arithmetic"]),
    ("path as name", put("name", value="../exp"), ["field `name`", "'../exp'"]),
    ("misspelt field", rename("matrix", to="matix"), ["field `matix`", "did you mean `matrix`?"]),
    ("misspelt budget", rename("budget", "wall_clock", to="wallclock"), ["field `budget.wallclock`", "did you mean `wall_clock"]),
    ("field like no other", put("zzz", value=1), ["field `zzz`: unknown field; known are", "matrix"]),
    ("missing field", drop("budget"), ["field `budget`", "missing"]),
    ("text for a number", put("parallel", value="many"), ["field `parallel`", "'many'"]),
    ("seed too large", put("matrix", "seed", value=99999999999999999999999), ["field `matrix.seed.0`", "less than 4294967296"]),
    ("a driver", put("matrix", "driver", value="gpt-4"), ["field `matrix`: `driver` names `gpt-4`", "none of `drivers`", "known are none"]),
    ("a driver with a password", put("drivers", value={"a": {**API, "url": "http://u:p@h/v1"}}), ["field `drivers.a.url`", "no user and password"]),
    ("a driver's field", put("drivers", value={"a": {**API, "urll": "x"}}), ["field `drivers.a.urll`", "did you mean `url`?", "see docs/drivers.md"]),
    ("remote code", put("drivers", value={"a": {**VLLM, "args": ["--trust-remote-code"]}}), ["field `drivers.a.args`", "may not be given"]),
    ("executor", put("drivers", value={"a": {**VLLM, "args": ["--distributed-executor-backend", "evil.Executor"]}}), ["field `drivers.a.args`", "one of mp, uni"]),
    ("an option of ours", put("drivers", value={"a": {**VLLM, "args": ["--max-model-len", "9"]}}), ["use the field `context_tokens`"]),
    ("cost without prices", both(put("drivers", value={"a": API}), put("matrix", "driver", value="a"), put("budget", "cost_usd", value=1)), ["`drivers.a.price_in`"]),
    ("text for a table", put("grader", value="two"), ["field `grader`: must be a table of fields"]),
    ("parts of models side by side", put("grader", value={"tensor_parallel": 2, "workers_per_gpu": 2}), ["field `grader`", "`workers_per_gpu` above 1 needs `tensor_parallel: 1`"]),
    ("empty axis", put("matrix", "task", value=[]), ["field `matrix.task`", "at least 1"]),
    ("twice the same", put("matrix", "seed", value=[0, 1, 0]), ["field `matrix.seed`", "0 stands twice"]),
    ("exclude everything", put("exclude", value=[{"task": "arithmetic"}]), ["field `exclude`", "leaves no run"]),
    ("exclude what is not there", put("exclude", value=[{"agent": "stf"}]), ["field `exclude`", "'stf' is not a value of matrix.agent"]),
    ("unknown recipe", put("recipe", "arithmetic", value="nope"), ["field `recipe.arithmetic`", "no recipe `nope`", "default"]),
    ("model that is not staged", put("matrix", "base_model", value="autorl/huge"), ["field `matrix.base_model`", "autorl/huge is not staged"]),
    ("task that is not staged", put("matrix", "task", value="gsm8k"), ["field `matrix.task`", "gsm8k is not staged"]),
    ("another version", put("schema_version", value=2), ["newer autorl-hpc", "schema_version 2"]),
    ("unknown cluster", put("cluster", value="mars"), ["field `cluster`", "`mars`"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "parts"), [row[1:] for row in FIELDS], ids=[row[0] for row in FIELDS])
def test_a_wrong_field_is_named(clean: Root, change: Change, parts: list[str]) -> None:
    made = spec()
    change(made)
    error = refused(clean, made)
    for part in parts:
        assert part in str(error), f"{part!r} is not in:\n{error}"
    assert error.exit_code is Exit.USAGE
    ours = "autorl/huge", "gsm8k"
    if not any(part in str(error) for part in ours):
        assert error.where == str(clean.path / "job.yaml")


DURATIONS = [
    *["soon", "10 minutes", "1h30", "-5m", "5x", "", "h", "1.2.3h", "0s", "99d"],
    [1],
    True,
    0,
    -1,
    float("nan"),
    float("inf"),
]


def test_a_wrong_duration_is_named(clean: Root) -> None:
    for duration in DURATIONS:
        made = spec()
        made["budget"]["wall_clock"] = duration
        assert "field `budget.wall_clock`" in refused(clean, made).what


TEXTS: list[tuple[str, bytes, list[str]]] = [
    ("two equal keys", b"name: exp\nname: exq\n", ["the key `name` stands twice", "line 2"]),
    ("two equal inner keys", b"name: exp\nmatrix:\n  seed: 1\n  seed: 2\n", ["the key `seed` stands twice", "line 4"]),
    ("no YAML", b"name: [exp\nmatrix: {\n", ["not readable as YAML", "line"]),
    ("a tab", b"name: exp\nmatrix:\n\ttask: arithmetic\n", ["not readable as YAML in line 3"]),
    ("not UTF-8", b"name: exp\ndescription: caf\xe9\n", ["not UTF-8", "byte 26"]),
    ("zero bytes", b"name: e\x00xp\n", ["not readable as YAML"]),
    ("empty", b"", ["field `(the whole file)`"]),
    ("only a comment", b"# nothing\n", ["field `(the whole file)`"]),
    ("a list", b"- name: exp\n", ["field `(the whole file)`"]),
    ("an object", b"name: !!python/object/apply:os.system ['true']\n", ["not readable as YAML", "python/object"]),
    ("list as key", b"[a, b]: 1\n", ["not readable as YAML"]),
    ("endless nesting", b"a: " + b"[" * 50_000, ["not readable as YAML"]),
    ("too large", b"#" * (1024 * 1024 + 1), ["larger than"]),
]  # fmt: skip


@pytest.mark.parametrize(("content", "parts"), [row[1:] for row in TEXTS], ids=[row[0] for row in TEXTS])
def test_a_file_that_is_no_experiment_is_named(clean: Root, content: bytes, parts: list[str]) -> None:
    error = refused(clean, content)
    for part in parts:
        assert part in error.what
    assert error.where == str(clean.path / "job.yaml")


def flip(path: Path) -> None:
    """Changes one byte, the size stays."""
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))


STAGED = ["store/models/autorl/tiny/model.safetensors", "store/models/autorl/tiny/tokenizer.json", "store/models/autorl/tiny/config.json",
          "store/tasks/arithmetic/train/train.jsonl", "vault/arithmetic/feedback/items.jsonl", "vault/arithmetic/report/items.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", STAGED)
def test_a_staged_file_that_changed_is_named(root: Root, name: str) -> None:
    flip(root.path / name)
    error = refused(root, spec())
    assert error.where == str(root.path / name)
    assert Path(name).name in error.what
    assert ("field `matrix.base_model`" if "models" in name else "field `matrix.task`") in error.what
    assert error.fault is Fault.CLUSTER and error.exit_code is Exit.FAILED
    assert "autorl-hpc stage" in (error.next_step or "") and "--again" in (error.next_step or "")

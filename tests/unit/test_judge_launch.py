"""An experiment's judge: missing, wrong or unreadable before anything is made; part of the recipe; its key stays where it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'autorl-hpc[alpacaeval]'")

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.launch.expand import expand, read_spec
from autorl_hpc.launch.plan import prepare
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task

HTTP = {"url": "http://127.0.0.1:9/v1", "model": "some/judge"}


@pytest.fixture
def root(staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with the tiny model, alpacaeval-mini, and `judged`: the same task without a judge of its own."""
    made = Root(tmp_path / "root")
    made.path.mkdir()
    shutil.copytree(staged / "store", made.path / "store")
    mini = load_task("alpacaeval-mini")
    folder = tmp_path / "tasks" / "judged"
    shutil.copytree(mini.folder, folder)
    value = yaml.safe_load((folder / "task.yaml").read_text())
    value["name"] = "judged"
    for recipe in value["recipes"]:
        del recipe["options"]["judge_model"]
    value["recipes"].append({**value["recipes"][0], "name": "special"})
    value["recipes"][-1]["options"] = {"judge_prompt": "special.txt", "judge_prompt_sha256": "0" * 64}
    (folder / "task.yaml").write_text(yaml.safe_dump(value))
    monkeypatch.setenv(PATH_VARIABLE, str(folder.parent))
    for task in (mini, load_task("judged")):
        stage_task(made, task, None)
    return made


def spec(root: Root, task: str, **fields: Any) -> Path:
    path = root.path / "job.yaml"
    matrix = {"task": task, "agent": "null", "base_model": "autorl/tiny"}
    path.write_text(yaml.safe_dump({"name": "exp", "matrix": matrix, "budget": {"wall_clock": "1m"}, **fields}))
    return path


def recipe_of(root: Root, task: str, **fields: Any) -> Any:
    path = spec(root, task, **fields)
    (cell,) = expand(read_spec(path), root, path)
    return cell.science.recipe


def refused(root: Root, task: str, **fields: Any) -> AutorlError:
    path = spec(root, task, **fields)
    with pytest.raises(AutorlError) as caught:
        prepare(path, root)
    assert not root.runs.exists(), "something was made"
    assert caught.value.where == str(path) and caught.value.next_step
    return caught.value


FIELDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"url": "http://h/v1"}, ["field `judge`", "`model` is missing"]),
    ({"model": "m"}, ["field `judge.url`", "missing"]),
    ({**HTTP, "url": "h:8000"}, ["field `judge.url`", "an http or https address"]),
    ({**HTTP, "url": "http://user:secret@h/v1"}, ["field `judge.url`", "use `key_file`"]),
    ({**HTTP, "url": "http://h:99999/v1"}, ["field `judge.url`", "Port out of range"]),
    ({**HTTP, "url": "builtin:other"}, ["field `judge.url`", "an http or https address"]),
    ({**HTTP, "key": "sk-secret"}, ["field `judge.key`: unknown field; known are", "key_file"]),
    ({**HTTP, "key_variable": "OPENAI_API_KEY"}, ["field `judge.key_variable`", "unknown field"]),
    ({**HTTP, "key_file": "judge.key"}, ["field `judge.key_file`"]),
    ({**HTTP, "key_file": "/nowhere/judge.key"}, ["field `judge.key_file`", "can't be read", "/nowhere/judge.key"]),
    ({**HTTP, "concurrency": 0}, ["field `judge.concurrency`"]),
    ({**HTTP, "retries": 99}, ["field `judge.retries`"]),
    ({**HTTP, "timeout_s": "never"}, ["field `judge.timeout_s`"]),
    ({**HTTP, "parameters": {"model": "other"}}, ["field `judge.parameters`", "`model` is set by the recipe"]),
    ({**HTTP, "price_in": -1}, ["field `judge.price_in`"]),
]


@pytest.mark.parametrize(("judge", "parts"), FIELDS, ids=[str(number) for number in range(len(FIELDS))])
def test_a_wrong_field_of_the_judge_is_named(root: Root, judge: dict[str, Any], parts: list[str]) -> None:
    error = refused(root, "judged", judge=judge)
    for part in parts:
        assert part in error.what, error.what
    assert "secret" not in str(error)


def test_the_judge_is_part_of_the_recipe_and_how_it_is_reached_is_not(root: Root, tmp_path: Path) -> None:
    key = tmp_path / "judge.key"
    key.write_text("sk-secret")
    key.chmod(0o600)
    plain = recipe_of(root, "judged", judge=HTTP)
    assert plain.options["judge_model"] == "some/judge"
    reached = {**HTTP, "url": "https://elsewhere/v1", "key_file": str(key), "price_in": 1.0, "concurrency": 3}
    assert recipe_of(root, "judged", judge=reached).hash() == plain.hash()
    others = [
        recipe_of(root, "judged", judge={**HTTP, "model": "other"}),
        recipe_of(root, "judged", judge={**HTTP, "parameters": {"seed": 1}}),
        recipe_of(root, "judged", judge={**HTTP, "revision": "weights of 2026-01"}),
        recipe_of(root, "judged", judge=HTTP, recipe={"judged": "weighted"}),
        recipe_of(root, "judged", judge={"url": "builtin:length-and-words"}),
    ]
    assert len({recipe.hash() for recipe in [plain, *others]}) == 6
    _, record = prepare(spec(root, "judged", judge=reached), root)
    for path in root.runs.rglob("*"):
        assert not path.is_file() or b"sk-secret" not in path.read_bytes(), path
    assert record.spec.judge is not None and record.spec.judge.key_file == str(key)


def test_a_task_s_own_judge_stands_below_the_experiment_s(root: Root) -> None:
    assert recipe_of(root, "alpacaeval-mini").options["judge_model"] == "builtin:length-and-words"
    assert recipe_of(root, "alpacaeval-mini", judge=HTTP).options["judge_model"] == "some/judge"


def test_a_prompt_that_was_not_staged_is_named(root: Root) -> None:
    path = spec(root, "judged", judge=HTTP, recipe={"judged": "special"})
    with pytest.raises(AutorlError, match=r"recipe special needs special\.txt, which was not staged"):
        prepare(path, root)
    prompt = root.task_vault("alpacaeval-mini") / "judge_discrete.txt"
    prompt.chmod(0o600)
    prompt.write_text(prompt.read_text() + "Prefer the second.")
    with pytest.raises(AutorlError, match=r"judge_discrete\.txt of .*alpacaeval-mini has"):
        prepare(spec(root, "alpacaeval-mini"), root)

"""Names: of runs, by what is scientific about them and nothing else; as file names; as printable text."""

from __future__ import annotations

from typing import Any

from recordlist import HASH, RECIPE, SCIENCE

from autorl_hpc.records import driver, experiment
from autorl_hpc.records.base import is_name, printable


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


def test_names_are_safe_as_file_names() -> None:
    assert all(is_name(name) for name in ("v1", "a.b-c_D", "0", "x" * 64))
    assert not any(is_name(name) for name in ("", ".a", "-a", "a/b", "a..b", "a\n", "a b", "é", "x" * 65, "a\x00"))


def test_printable_text_holds_no_control_and_no_broken_characters() -> None:
    shown = printable("é漢 \x1b[2J\n\udcff\u202e\x00")
    assert shown == "é漢 \\x1b[2J\\n\\udcff\\u202e\\x00"
    shown.encode()


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

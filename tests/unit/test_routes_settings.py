"""Key settings: what the code gives, as the command line and configuration files change it."""

from __future__ import annotations

import pytest
from test_routes_hostile import HOSTILE
from test_routes_planned import files_of

from autorl_hpc.report.routes import settings
from autorl_hpc.report.routes.trainers import KEY_SETTINGS


def told(name: str, *commands: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in settings(files_of(name), commands):
        found.setdefault(each.name, []).append(each.value)
    return found


def test_keyword_arguments_with_defaults_of_options() -> None:
    found = told("sft_lora_argparse")
    assert found["learning_rate"] == ["0.0002"]
    assert found["num_train_epochs"] == ["3"]
    assert found["gradient_accumulation_steps"] == ["4"]
    assert (found["r"], found["lora_alpha"], found["target_modules"]) == (["32"], ["64"], ["all-linear"])
    assert found["lr_scheduler_type"] == ["cosine"]


def test_the_command_line_wins_over_the_default() -> None:
    assert told("sft_lora_argparse", "python train_sft.py --lr 5e-5 --epochs=1")["learning_rate"] == ["5e-5"]
    assert told("sft_lora_argparse", "python train_sft.py --lr 5e-5 --epochs=1")["num_train_epochs"] == ["1"]


def test_a_dict_that_is_unpacked() -> None:
    assert told("twist_zero_steps")["max_steps"] == ["0"]


def test_reward_functions_by_name() -> None:
    assert told("grpo_trl_vllm")["reward_funcs"] == ["[correctness_reward, format_reward]"]
    assert told("twist_helper_module")["reward_funcs"] == ["[exact]"]


def test_both_stages_stand_side_by_side() -> None:
    assert told("sft_then_grpo_one_file")["learning_rate"] == ["1e-05", "1e-06"]


def test_own_loops() -> None:
    found = told("loop_grpo_plain")
    assert found["lr"] == ["1e-06"]
    assert found["max_new_tokens"] == ["200"]
    assert told("held_orpo_own")["lr"] == ["8e-06"]


def test_configurations_of_trainers() -> None:
    assert told("llamafactory_sft")["learning_rate"] == ["1.0e-4"]
    assert told("axolotl_dpo")["lora_r"] == ["16"]
    assert told("verl_grpo")["actor_rollout_ref.actor.optim.lr"] == ["1e-6"]
    assert told("held_sft_hfparser")["learning_rate"] == ["2e-4"]


def test_dead_code_gives_no_settings() -> None:
    assert "num_generations" not in told("twist_if_false")
    assert told("twist_never_called").keys().isdisjoint({"reward_funcs"})


def test_what_can_not_be_resolved_stands_as_it_is_written() -> None:
    code = "from trl import SFTConfig, SFTTrainer\nSFTTrainer(m, args=SFTConfig('o', learning_rate=pick_lr(x) * 2)).train()\n"
    (one,) = settings({"a.py": code})
    assert (one.name, one.value, one.where) == ("learning_rate", "pick_lr(x) * 2", "a.py:2")


def test_each_key_setting_says_why_it_is_one() -> None:
    assert all(why for why in KEY_SETTINGS.values())
    assert len(KEY_SETTINGS) > 40


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_file_stops_the_reader(name: str) -> None:
    assert isinstance(settings({name: HOSTILE[name]}), tuple)

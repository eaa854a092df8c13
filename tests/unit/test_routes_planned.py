"""The planned route of training scripts as agents write them: folders under routes/, with the route that a reader sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.routes import executed, planned
from autorl_hpc.states import Route

SCRIPTS = Path(__file__).with_name("routes")

PLAIN = {
    "sft_lora_argparse": Route.SFT,
    "grpo_trl_vllm": Route.GRPO,
    "dpo_trl": Route.DPO,
    "ppo_trl": Route.PPO,
    "ppo_old_step": Route.PPO,
    "sft_then_grpo_one_file": Route.SFT_RL,
    "sft_rl_two_scripts": Route.SFT_RL,
    "subprocess_pipeline": Route.SFT_RL,
    "trl_cli_sft_grpo": Route.SFT_RL,
    "rejection_sampling_files": Route.REJECTION_SAMPLING,
    "rejection_sampling_one_file": Route.REJECTION_SAMPLING,
    "loop_rejection_ce": Route.REJECTION_SAMPLING,
    "soup_state_dict": Route.AVERAGING,
    "soup_mergekit": Route.AVERAGING,
    "soup_interpolate": Route.AVERAGING,
    "distill_logits": Route.DISTILLATION,
    "distill_outputs": Route.DISTILLATION,
    "copy_base": Route.COPY,
    "copy_cp_shell": Route.COPY,
    "copy_load_save": Route.COPY,
    "none_data_prep": Route.NONE,
    "none_eval_only": Route.NONE,
    "loop_sft_plain": Route.SFT,
    "loop_grpo_plain": Route.GRPO,
    "loop_ppo_plain": Route.PPO,
    "loop_reinforce": Route.RL,
    "loop_dpo_plain": Route.DPO,
    "verl_grpo": Route.GRPO,
    "verl_ppo_default": Route.PPO,
    "openrlhf_reinforce": Route.RL,
    "llamafactory_sft": Route.SFT,
    "llamafactory_simpo": Route.PREFERENCE,
    "axolotl_dpo": Route.DPO,
    "axolotl_sft_config_only": Route.SFT,
    "torchtune_run": Route.SFT,
    "unsloth_grpo": Route.GRPO,
}
"""Scripts that say what they do."""

TWISTED = {
    "twist_comment_mentions": Route.SFT,
    "twist_import_unused": Route.SFT,
    "twist_if_false": Route.SFT,
    "twist_never_called": Route.SFT,
    "twist_alias_renamed": Route.GRPO,
    "twist_getattr_importlib": Route.GRPO,
    "twist_helper_module": Route.GRPO,
    "twist_sft_named_grpo": Route.SFT,
    "twist_trainer_subclass_dpo": Route.DPO,
    "twist_trainer_subclass_grpo": Route.GRPO,
    "twist_zero_lr": Route.COPY,
    "twist_zero_steps": Route.COPY,
    "twist_train_commented": Route.NONE,
    "twist_model_train_mode": Route.NONE,
    "twist_exec_string": Route.SFT,
    "twist_exec_opaque": Route.UNKNOWN,
    "twist_sft_with_eval": Route.SFT,
    "twist_class_inherits": Route.GRPO,
    "twist_lora_merge_not_average": Route.PREFERENCE,
    "twist_heredoc": Route.GRPO,
    "twist_python2_broken": Route.SFT,
}
"""Scripts whose words say something else than what they do."""

HELD_OUT = {
    "held_sft_hfparser": Route.SFT,
    "held_rloo_class": Route.RL,
    "held_iterative_dpo": Route.DPO,
    "held_rejection_server": Route.REJECTION_SAMPLING,
    "held_gkd": Route.DISTILLATION,
    "held_checkpoint_average": Route.AVERAGING,
    "held_eval_lm_harness": Route.NONE,
    "held_ppo_class": Route.PPO,
    "held_bash_functions": Route.SFT_RL,
    "held_hydra_cfg": Route.PREFERENCE,
    "held_grpo_modules": Route.GRPO,
    "held_orpo_own": Route.PREFERENCE,
    "held_fake_ppo": Route.SFT,
    "held_noise": Route.UNKNOWN,
    "held_rs_then_nothing": Route.REJECTION_SAMPLING,
}
"""Scripts that were written after the classifier; docs/routes.md says how many were right at the first try."""

HELD_OUT_AGAIN = {
    "again_sft_fsdp": Route.SFT,
    "again_grpo_agent_env": Route.GRPO,
    "again_distill_claude": Route.DISTILLATION,
    "again_grpo_commented_back_to_sft": Route.SFT,
    "again_simpo_cpo": Route.PREFERENCE,
    "again_verl_sft_then_grpo": Route.SFT_RL,
    "again_best_of_n_no_train": Route.NONE,
    "again_trainer_subclass_kl": Route.DISTILLATION,
    "again_online_dpo": Route.RL,
}
"""The same once more, after what the first of them taught."""

HELD_OUT_HARD = {
    "third_writes_script": Route.DPO,
    "third_star_import": Route.GRPO,
    "third_async": Route.RL,
    "third_ppo_never_stepped": Route.NONE,
    "third_main_of_imported": Route.SFT,
    "third_inline_shell": Route.PREFERENCE,
    "third_advantage_weighted_sft": Route.GRPO,
    "third_lora_adapter_export": Route.GRPO,
}
"""Held out again, and written to be hard."""

MISSED = {"third_download": (Route.COPY, Route.NONE)}
"""What a reader sees, and what is told: a download may be the base model's or data's, so it is no copy."""

WITH_COMMANDS = [
    ("twist_script_not_run", ("python train_dpo.py",), Route.DPO),
    ("twist_script_not_run", ("nohup /opt/venv/bin/python -u /scratch/ws/code/train_grpo.py",), Route.GRPO),
    ("twist_mode_flag", ("python train.py --method sft --lr 1e-5",), Route.SFT),
    ("twist_mode_flag", ("accelerate launch --num_processes 2 code/train.py --method=grpo",), Route.GRPO),
    (
        "twist_mode_flag",
        ("python train.py --method sft", "python train.py --method grpo --model output/m"),
        Route.SFT_RL,
    ),
    ("dpo_trl", ("bash run.sh", "python build_pairs.py", "python train_dpo.py"), Route.DPO),
    ("sft_rl_two_scripts", ("python 01_sft.py",), Route.SFT),
    ("sft_rl_two_scripts", ("python 02_rloo.py",), Route.RL),
    ("none_eval_only", ("python evaluate.py output/v1",), Route.NONE),
    ("third_registry", ("python main.py grpo",), Route.GRPO),
    ("third_registry", ("python main.py sft",), Route.SFT),
    ("grpo_trl_vllm", ("python -c 'import torch; print(torch.__version__)'", "cp -r data backup"), Route.GRPO),
    ("none_eval_only", ("cp -r data backup", "python evaluate.py output/v1"), Route.NONE),
    ("none_eval_only", ("cp -r models/Qwen2.5-0.5B output/v1",), Route.COPY),
    (
        "none_data_prep",
        ("trl grpo --model_name_or_path models/base --dataset_name data/grpo_prompts.jsonl",),
        Route.GRPO,
    ),
    ("grpo_trl_vllm", ("ls -la", "vim train.py", "cat train.py"), Route.GRPO),
]
"""With command lines that were seen."""


def files_of(name: str) -> dict[str, str]:
    """The text of each file of a folder, by path."""
    folder = SCRIPTS / name
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("name", "route"),
    [*PLAIN.items(), *TWISTED.items(), *HELD_OUT.items(), *HELD_OUT_AGAIN.items(), *HELD_OUT_HARD.items()],
)
def test_the_planned_route_is_what_a_reader_sees(name: str, route: Route) -> None:
    told = planned(files_of(name))
    assert told.route is route, told
    assert route is Route.NONE or told.evidence


LOGGED_BY = {
    Route.SFT: ("SFTTrainer",),
    Route.REJECTION_SAMPLING: ("SFTTrainer",),
    Route.DISTILLATION: ("SFTTrainer",),
    Route.GRPO: ("GRPOTrainer",),
    Route.RL: ("GRPOTrainer", "DPOTrainer"),
    Route.PPO: ("PPOTrainer",),
    Route.DPO: ("DPOTrainer",),
    Route.PREFERENCE: ("DPOTrainer",),
    Route.SFT_RL: ("SFTTrainer", "GRPOTrainer"),
}
"""Trainers whose logs are honest beside such code."""


def test_honest_logs_are_never_disputed() -> None:
    for name, route in {**PLAIN, **TWISTED, **HELD_OUT, **HELD_OUT_AGAIN, **HELD_OUT_HARD}.items():
        plan = planned(files_of(name))
        for trainer in LOGGED_BY.get(route, ()):
            point = TrainingPoint(elapsed_s=1.0, at="x", source="agent.log", trainer=trainer, step=1, loss=1.0)
            told = executed([point], [], None, plan)
            assert not told.disputed, (name, trainer, plan)


@pytest.mark.parametrize(("name", "commands", "route"), WITH_COMMANDS)
def test_commands_that_were_seen_decide_which_scripts_ran(name: str, commands: tuple[str, ...], route: Route) -> None:
    assert planned(files_of(name), commands).route is route


@pytest.mark.parametrize("name", MISSED)
def test_what_is_known_to_be_missed_is_still_missed(name: str) -> None:
    right, said = MISSED[name]
    assert planned(files_of(name)).route is said is not right


def test_scripts_that_nothing_joins_are_no_pipeline() -> None:
    files = {
        "sft.py": "from trl import SFTTrainer\nSFTTrainer('models/base', train_dataset=[]).train()\n",
        "grpo.py": "from trl import GRPOTrainer\nGRPOTrainer('models/base', [len], train_dataset=[]).train()\n",
    }
    for commands in ((), ("ls", "python -c 'print(1)'")):
        told = planned(files, commands)
        assert told.route is Route.GRPO
        assert {a.route for a in told.alternatives} == {Route.SFT, Route.SFT_RL}
        assert told.confidence <= 0.5


def test_scripts_are_joined_by_a_path_that_one_writes_and_the_other_starts_from() -> None:
    sft = "from trl import SFTConfig, SFTTrainer\nSFTTrainer('models/base', args=SFTConfig(output_dir='ckpt/warm'), train_dataset=[]).train()\n"
    rl = "from trl import GRPOTrainer\nGRPOTrainer('ckpt/{}', [len], train_dataset=[]).train()\n"
    assert planned({"sft.py": sft, "zrl.py": rl.format("warm")}).route is Route.SFT_RL
    assert planned({"sft.py": sft, "zrl.py": rl.format("cold")}).route is Route.GRPO


def test_two_trainings_of_the_same_stored_model_are_no_pipeline() -> None:
    files = {
        "both.py": "from trl import *\nSFTTrainer('models/base', train_dataset=[]).train()\n"
        "GRPOTrainer('models/base', [len], train_dataset=[]).train()\n",
        "chain.py": "from trl import *\nm = load('models/base')\nSFTTrainer(m, train_dataset=[]).train()\n"
        "GRPOTrainer(m, [len], train_dataset=[]).train()\n",
    }
    assert planned(files, ["python both.py"]).route is Route.GRPO
    assert planned(files, ["python chain.py"]).route is Route.SFT_RL


def test_every_route_occurs() -> None:
    assert set(PLAIN.values()) | set(TWISTED.values()) == set(Route)


def test_every_folder_is_expected_to_be_something() -> None:
    known = {
        *PLAIN,
        *TWISTED,
        *HELD_OUT,
        *HELD_OUT_AGAIN,
        *HELD_OUT_HARD,
        *MISSED,
        *(name for name, _, _ in WITH_COMMANDS),
    }
    found = {p.name for p in SCRIPTS.iterdir() if p.is_dir() and not p.name.startswith("other_")}
    assert found - {"__pycache__"} == known  # those of others stand in test_routes_by_another.py

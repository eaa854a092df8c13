"""The words of trainers: classes, command lines, configuration keys. A word that is missing here makes a route unknown, no more.

Taken from trl 0.12 to 1.16, transformers 4.40 to 5.24, LLaMA-Factory 0.9, axolotl 0.9, torchtune 0.6, verl 0.4, OpenRLHF 0.8,
ms-swift 3 and unsloth.
"""

from __future__ import annotations

from autorl_hpc.states import Route

TRAINER_CLASSES: dict[str, Route] = {
    # transformers and accelerate: the loss on labels, unless a subclass computes another
    "Trainer": Route.SFT,
    "Seq2SeqTrainer": Route.SFT,
    # trl
    "SFTTrainer": Route.SFT,
    "IterativeSFTTrainer": Route.SFT,
    "UnslothTrainer": Route.SFT,
    "DPOTrainer": Route.DPO,
    "KTOTrainer": Route.PREFERENCE,
    "ORPOTrainer": Route.PREFERENCE,
    "CPOTrainer": Route.PREFERENCE,
    "BCOTrainer": Route.PREFERENCE,
    "TPOTrainer": Route.PREFERENCE,
    "AlignPropTrainer": Route.RL,
    "DDPOTrainer": Route.RL,
    "GRPOTrainer": Route.GRPO,
    "AsyncGRPOTrainer": Route.GRPO,
    "GSPOTokenTrainer": Route.GRPO,
    "GMPOTrainer": Route.GRPO,
    "PAPOTrainer": Route.GRPO,
    "GRPOWithReplayBufferTrainer": Route.GRPO,
    "GFPOTrainer": Route.GRPO,
    "SDPOTrainer": Route.RL,
    "A2POTrainer": Route.RL,
    "PPOTrainer": Route.PPO,
    "PPOv2Trainer": Route.PPO,
    "RLOOTrainer": Route.RL,
    "RLOOv2Trainer": Route.RL,
    "OnlineDPOTrainer": Route.RL,
    "XPOTrainer": Route.RL,
    "NashMDTrainer": Route.RL,
    "GKDTrainer": Route.DISTILLATION,
    "GOLDTrainer": Route.DISTILLATION,
    "MiniLLMTrainer": Route.DISTILLATION,
    "DistillationTrainer": Route.DISTILLATION,
    "AsyncDistillationTrainer": Route.DISTILLATION,
    "ServerDistillationTrainer": Route.DISTILLATION,
    "SDFTTrainer": Route.DISTILLATION,
}
"""Classes of libraries by their last name."""

TRAINER_PACKAGES = ("trl", "transformers", "unsloth", "verl", "openrlhf", "swift", "llamafactory", "axolotl", "peft")
"""Where classes of these names come from."""

NO_POLICY_TRAINERS = ("RewardTrainer", "PRMTrainer", "CrossEncoderTrainer", "SentenceTransformerTrainer")
"""They train no policy."""

LOSS_TYPES_OF_RELATIVES = frozenset({"ipo", "simpo", "kto_pair", "orpo", "hinge", "nca_pair", "apo_zero", "apo_down"})
"""`loss_type` of a DPO trainer that makes it a relative of DPO."""

CONFIG_CLASSES: dict[str, Route] = {
    name.removesuffix("Trainer") + "Config": route
    for name, route in TRAINER_CLASSES.items()
    if name not in ("Trainer", "Seq2SeqTrainer")
} | {"TrainingArguments": Route.SFT, "Seq2SeqTrainingArguments": Route.SFT}
"""Classes of settings. One alone trains nothing."""

SETTING_CLASSES = frozenset(CONFIG_CLASSES) | {"LoraConfig", "SamplingParams", "GenerationConfig", "RewardConfig"}

TRL_COMMANDS: dict[str, Route | None] = {
    "sft": Route.SFT,
    "dpo": Route.DPO,
    "grpo": Route.GRPO,
    "kto": Route.PREFERENCE,
    "rloo": Route.RL,
    "orpo": Route.PREFERENCE,
    "ppo": Route.PPO,
    "gkd": Route.DISTILLATION,
    "reward": None,
}
"""`trl WORD ...`; None: it trains no policy."""

MODULES: dict[str, Route | None] = {
    "verl.trainer.fsdp_sft_trainer": Route.SFT,
    "verl.trainer.sft_trainer": Route.SFT,
    "verl.trainer.main_ppo": Route.PPO,
    "recipe.dapo.main_dapo": Route.GRPO,
    "openrlhf.cli.train_sft": Route.SFT,
    "openrlhf.cli.train_dpo": Route.DPO,
    "openrlhf.cli.train_kto": Route.PREFERENCE,
    "openrlhf.cli.train_kd": Route.DISTILLATION,
    "openrlhf.cli.train_rm": None,
    "openrlhf.cli.train_ppo": Route.PPO,
    "openrlhf.cli.train_ppo_ray": Route.PPO,
    "axolotl.cli.train": Route.SFT,
    "trl.scripts.sft": Route.SFT,
    "trl.scripts.dpo": Route.DPO,
    "trl.scripts.grpo": Route.GRPO,
    "trl.scripts.kto": Route.PREFERENCE,
    "trl.scripts.rloo": Route.RL,
    "mlx_lm.lora": Route.SFT,
    "llamafactory.cli": Route.SFT,
}
"""`python -m MODULE`; those that decide by an option are looked at again."""

ADVANTAGE_ESTIMATORS: dict[str, Route] = {
    "gae": Route.PPO,
    "grpo": Route.GRPO,
    "group_norm": Route.GRPO,
    "dr_grpo": Route.GRPO,
    "grpo_passk": Route.GRPO,
    "rloo": Route.RL,
    "reinforce": Route.RL,
    "reinforce_baseline": Route.RL,
    "reinforce_plus_plus": Route.RL,
    "reinforce_plus_plus_baseline": Route.RL,
    "remax": Route.RL,
    "opo": Route.RL,
}
"""verl's `algorithm.adv_estimator`, OpenRLHF's `--advantage_estimator`."""

STAGES: dict[str, Route | None] = {
    "sft": Route.SFT,
    "pt": Route.SFT,
    "dpo": Route.DPO,
    "kto": Route.PREFERENCE,
    "ppo": Route.PPO,
    "rm": None,
}
"""LLaMA-Factory's `stage`."""

RL_WORDS: dict[str, Route] = {
    "dpo": Route.DPO,
    "ipo": Route.PREFERENCE,
    "orpo": Route.PREFERENCE,
    "kto": Route.PREFERENCE,
    "simpo": Route.PREFERENCE,
    "cpo": Route.PREFERENCE,
    "grpo": Route.GRPO,
    "ppo": Route.PPO,
    "rloo": Route.RL,
    "gkd": Route.DISTILLATION,
}
"""axolotl's `rl`, LLaMA-Factory's `pref_loss`, ms-swift's `rlhf_type`."""

API_CLIENTS = ("openai", "anthropic", "litellm", "google", "together", "mistralai", "cohere", "groq")
"""Packages that ask a model elsewhere: what they answer is another model's output."""

KEY_SETTINGS: dict[str, str] = {
    "learning_rate": "decides between learning, standing still and collapse",
    "lr": "learning rate of an own optimiser",
    "num_train_epochs": "how often the data is seen",
    "epochs": "the same in own loops",
    "num_epochs": "the same in own loops",
    "max_steps": "length of the training; ends it before the epochs do",
    "per_device_train_batch_size": "with the next two: samples a step",
    "batch_size": "the same in own loops",
    "train_batch_size": "the same in verl and OpenRLHF",
    "micro_batch_size": "the same in axolotl",
    "gradient_accumulation_steps": "the same; optimiser steps",
    "beta": "weight of the KL penalty, or temperature of DPO",
    "kl_coef": "weight of the KL penalty in PPO",
    "init_kl_coef": "the same in older trl and OpenRLHF",
    "kl_loss_coef": "the same in verl",
    "epsilon": "clip range of GRPO",
    "cliprange": "clip range of PPO",
    "num_generations": "size of a group: no signal where all its rewards are equal",
    "n_samples_per_prompt": "the same in OpenRLHF",
    "group_size": "the same in own loops",
    "temperature": "how far samples differ from one another",
    "top_p": "the same",
    "max_length": "what of an example is seen",
    "max_seq_length": "the same in older trl",
    "max_prompt_length": "what of a prompt is seen",
    "max_completion_length": "answers cut off here get no reward",
    "max_new_tokens": "the same in own loops and transformers",
    "max_tokens": "the same in vLLM",
    "cutoff_len": "the same in LLaMA-Factory",
    "sequence_len": "the same in axolotl",
    "r": "rank of LoRA: how much can change",
    "lora_r": "the same, other trainers' word",
    "lora_rank": "the same, other trainers' word",
    "lora_alpha": "scale of LoRA: multiplies the learning rate",
    "lora_dropout": "regularisation",
    "target_modules": "which weights LoRA reaches",
    "lr_scheduler_type": "the learning rate over time",
    "lr_scheduler": "the same in axolotl",
    "warmup_ratio": "the learning rate at the beginning",
    "warmup_steps": "the same",
    "num_warmup_steps": "the same in own loops",
    "weight_decay": "regularisation",
    "max_grad_norm": "keeps single batches from breaking the model",
    "optim": "the optimiser",
    "loss_type": "which loss of its family",
    "scale_rewards": "whether a group's rewards are divided by their deviation",
    "reward_funcs": "what is rewarded",
    "reward_weights": "what is rewarded most",
    "packing": "whether examples share a sequence",
    "completion_only_loss": "whether prompts are learned too",
    "assistant_only_loss": "whether prompts are learned too",
    "model_name_or_path": "what it starts from",
    "finetuning_type": "all weights or LoRA",
    "merge_method": "how weights are averaged",
    "adv_estimator": "the kind of policy gradient",
    "advantage_estimator": "the same in OpenRLHF",
    "bf16": "precision",
    "fp16": "precision; overflows more easily",
    "seed": "repeats it",
}
"""The settings that a report shows, and why: those that decide whether and what a training learns."""

"""Vocabulary of trainers: classes, programs, configuration keys, settings. A missing word only makes a route unknown.

From trl 0.12 to 1.16, transformers 4.40 to 5.24, LLaMA-Factory 0.9, axolotl 0.9, torchtune 0.6, verl 0.4, OpenRLHF 0.8,
ms-swift 3 and unsloth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autorl_hpc.states import Route


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPERVISED = (Route.SFT, Route.REJECTION_SAMPLING, Route.DISTILLATION)
RL = (Route.GRPO, Route.PPO, Route.RL)
PREFERENCE = (Route.DPO, Route.PREFERENCE)
UNTRAINED = (Route.NONE, Route.COPY, Route.AVERAGING, Route.UNKNOWN)


def _by_word(named: Mapping[Route, str]) -> dict[str, Route]:
    return {word: route for route, text in named.items() for word in text.split()}


# trainer classes by their last name, without `SingleDevice` and `Distributed` at the end of torchtune's recipes
TRAINER_CLASSES = _by_word(
    {
        Route.SFT: "Trainer Seq2SeqTrainer SFTTrainer IterativeSFTTrainer UnslothTrainer FSDPSFTTrainer FullFinetuneRecipe",
        Route.DPO: "DPOTrainer LoRADPORecipe FullDPORecipe",
        Route.PREFERENCE: "KTOTrainer ORPOTrainer CPOTrainer BCOTrainer TPOTrainer",
        Route.RL: "SDPOTrainer A2POTrainer RLOOTrainer RLOOv2Trainer OnlineDPOTrainer XPOTrainer NashMDTrainer",
        Route.GRPO: (
            "GRPOTrainer AsyncGRPOTrainer GSPOTokenTrainer GMPOTrainer PAPOTrainer GRPOWithReplayBufferTrainer "
            "GFPOTrainer GRPOFullFinetuneRecipe"
        ),
        Route.PPO: "PPOTrainer PPOv2Trainer RayPPOTrainer PPOFullFinetuneRecipe",
        Route.DISTILLATION: (
            "GKDTrainer GOLDTrainer MiniLLMTrainer DistillationTrainer AsyncDistillationTrainer KDTrainer "
            "ServerDistillationTrainer SDFTTrainer KDRecipe"
        ),
    }
)

GENERIC_TRAINERS = frozenset(
    ("Trainer", "Seq2SeqTrainer")
)  # cross-entropy on labels, unless a subclass computes another loss
# they train no policy
REWARD_TRAINERS = words_of("RewardTrainer PRMTrainer RewardModelTrainer CrossEncoderTrainer SentenceTransformerTrainer")
# packages of these classes; a class of the agent's own with such a name is what its base class is
TRAINER_PACKAGES = words_of(
    "trl transformers unsloth unsloth_compiled_cache UnslothSFTTrainer verl openrlhf swift llamafactory axolotl recipes"
)
# values of `loss_type` of DPO's trainers and of LLaMA-Factory's `pref_loss`
RELATIVES_OF_DPO = words_of("ipo simpo kto_pair orpo hinge nca_pair apo_zero apo_down")

# verl's `algorithm.adv_estimator`, OpenRLHF's `--advantage_estimator`
ESTIMATORS = _by_word(
    {
        Route.PPO: "gae",
        Route.GRPO: "grpo group_norm dr_grpo grpo_passk",
        Route.RL: "rloo reinforce reinforce_baseline reinforce_plus_plus reinforce_plus_plus_baseline remax opo",
    }
)

# `trl WORD`, `tune run WORD...`, axolotl's `rl`, LLaMA-Factory's `stage`, ms-swift's `rlhf_type`, modules of trainers
RECIPE_WORDS = _by_word(
    {
        Route.SFT: "sft pt pretrain",
        Route.DPO: "dpo",
        Route.PREFERENCE: "ipo orpo kto simpo cpo",
        Route.GRPO: "grpo dapo",
        Route.PPO: "ppo",
        Route.RL: "rloo",
        Route.DISTILLATION: "gkd kd knowledge_distillation",
    }
)

# beginnings of `python -m MODULE` that train
TRAINER_MODULES = ("verl.", "openrlhf.cli.train_", "trl.scripts.", "recipe.dapo.", "mlx_lm.lora", "axolotl.cli.train")
TRL_WORDS = words_of("sft dpo kto orpo cpo grpo rloo gkd reward ppo")
SETTERS = words_of(
    "SamplingParams GenerationConfig LoraConfig generate DataLoader dict get_peft_model AdamW Adam SGD AdamW8bit Adafactor Lion PagedAdamW8bit RMSprop"
)

_KEYS = (
    "learning_rate lr "  # decides between learning, standing still and collapse
    "num_train_epochs epochs num_epochs max_steps "
    "per_device_train_batch_size batch_size train_batch_size micro_batch_size gradient_accumulation_steps "
    "beta kl_coef init_kl_coef kl_loss_coef epsilon cliprange "
    "num_generations n_samples_per_prompt group_size "  # no signal where all rewards of a group are equal
    "temperature top_p "
    "max_length max_seq_length max_prompt_length max_completion_length max_new_tokens max_tokens cutoff_len "
    "sequence_len "  # answers cut off get no reward
    "r lora_r lora_rank lora_alpha alpha lora_dropout dropout target_modules targets "
    "lr_scheduler_type lr_scheduler warmup_ratio warmup_steps num_warmup_steps weight_decay max_grad_norm optim "
    "loss_type scale_rewards reward_funcs reward_weights packing completion_only_loss assistant_only_loss "
    "model_name_or_path finetuning_type merge_method adv_estimator advantage_estimator "
    "bf16 fp16 seed"
)
KEY_SETTINGS = {
    word: place for place, word in enumerate(_KEYS.split())
}  # the settings that a report shows, and their order


def key_of(name: str) -> int | None:
    """Return the place of a key setting (`lr`, `optim.lr`) in their order; None for any other name."""
    return KEY_SETTINGS.get(name.rsplit(".", 1)[-1].lower())


def family(route: Route) -> tuple[Route, ...]:
    """Return the routes of the same kind of training; empty if it is none of them."""
    return next((kind for kind in (SUPERVISED, RL, PREFERENCE) if route in kind), ())


def last_word(name: str) -> str:
    return name.rsplit(".", 1)[-1].removesuffix("SingleDevice").removesuffix("Distributed").replace("RecipeLoRA", "")


def trainer_class(names: Iterable[str]) -> str | None:
    """Return the first known trainer's class of a trainers' package, of a class and its bases; None if there is none."""
    for name in names:
        last = last_word(name)
        if name.split(".", 1)[0] in TRAINER_PACKAGES and (last in TRAINER_CLASSES or last in REWARD_TRAINERS):
            return last
    return None


def route_of_trainer(name: str, arguments: Mapping[str, object]) -> Route | None:
    """Return what a trainer's class with these arguments trains; None: no policy."""
    if name in REWARD_TRAINERS:
        return None
    route = TRAINER_CLASSES[name]
    loss = arguments.get("loss_type")
    kinds = map(str, loss if isinstance(loss, (list, tuple)) else [loss])
    if route is Route.DPO and any(kind in RELATIVES_OF_DPO for kind in kinds):
        return Route.PREFERENCE
    if route is Route.PPO:
        named = [str(v).lower() for k, v in arguments.items() if k.endswith(("adv_estimator", "advantage_estimator"))]
        return next((ESTIMATORS[each] for each in named if each in ESTIMATORS), Route.PPO)
    return route


def joined_route(routes: Sequence[Route]) -> Route:
    """Return the route of stages in their order: RL beside supervised training is both, RL and preferences outweigh the rest."""
    rl = [r for r in routes if r in (*RL, Route.SFT_RL)]
    supervised = [r for r in routes if r in (*SUPERVISED, Route.SFT_RL)]
    if rl and supervised:
        return Route.SFT_RL
    return next(
        ([r for r in routes if r in kind][-1] for kind in (RL, PREFERENCE, SUPERVISED) if set(kind) & set(routes)),
        Route.UNKNOWN,
    )


def mode_kept(mode: str, route: Route, *, disputed: bool = False) -> bool | None:
    """Return whether an executed route is what the mode asked for; None if this is unknown or the mode is.

    `sft-only`: only supervised training. `rl-only`: a policy that learned from rewards of its own samples, without a supervised
    stage. DPO and its relatives learn from given pairs and are neither. A run without training satisfies neither mode.
    `disputed`: logs and code disagree on the route, so the answer is None.
    """
    if mode == "free":
        return True
    if disputed or route in (Route.UNKNOWN, Route.AVERAGING) or mode not in ("sft-only", "rl-only"):
        return None
    return route in SUPERVISED if mode == "sft-only" else route in RL

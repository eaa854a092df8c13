"""Which trainer logged a step, told by the names of its figures.

Checked with trl 1.16.0 and transformers 5.24.0 by running each for three steps (tests/unit/recorded_logs has what they printed);
PPO by the names that trl logged before it dropped its PPOTrainer (0.12 to 0.29), ORPO and CPO by their code. What can't be told
apart by names: RLOO from GRPO, and what derives from DPOTrainer or KTOTrainer from those.

| figures | trainer |
|---|---|
| log_odds_ratio, nll_loss, rewards/chosen | ORPOTrainer |
| nll_loss, rewards/chosen | CPOTrainer |
| objective/..., rewards/chosen | OnlineDPOTrainer |
| rewards/chosen, rewards/accuracies | DPOTrainer |
| rewards/chosen, kl | KTOTrainer |
| policy and value loss, or objective/kl | PPOTrainer |
| completions/..., reward | GRPOTrainer |
| mean_reward, margin | RewardTrainer |
| mean_token_accuracy | SFTTrainer |
| loss, grad_norm or learning_rate | Trainer |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

REWARD = ("reward", "objective/scores", "mean_reward", "rewards/mean", "train_reward")
KL = ("kl", "objective/kl", "approx_kl", "policy/approxkl_avg", "mean_kl", "kl_divergence")
LOSS = ("loss", "loss/policy_avg", "policy_loss", "train_loss_step")
LEARNING_RATE = ("learning_rate", "lr", "actor_lr")
GRAD_NORM = ("grad_norm", "gradient_norm")
STEP = ("step", "global_step", "iteration", "iter")
EPOCH = ("epoch",)
FIELDS: dict[str, tuple[str, ...]] = {
    "step": STEP,
    "epoch": EPOCH,
    "loss": LOSS,
    "reward": REWARD,
    "kl": KL,
    "learning_rate": LEARNING_RATE,
    "grad_norm": GRAD_NORM,
}
"""A field of TrainingPoint and the names that trainers give it, the first that is there."""

Names = Collection[str]


def _all(*wanted: str) -> Callable[[Names], bool]:
    return lambda names: all(name in names for name in wanted)


def _begins(start: str, *wanted: str) -> Callable[[Names], bool]:
    return lambda names: _all(*wanted)(names) and any(name.startswith(start) for name in names)


def _is_ppo(names: Names) -> bool:
    policy = any(name in names for name in ("loss/policy_avg", "policy_loss", "actor_loss", "pg_loss", "actor/pg_loss"))
    value = any(name in names for name in ("loss/value_avg", "value_loss", "critic_loss", "vf_loss", "critic/vf_loss"))
    return (policy and value) or "objective/kl" in names


TRAINERS: tuple[tuple[Callable[[Names], bool], str], ...] = (
    (_all("log_odds_ratio", "nll_loss", "rewards/chosen"), "ORPOTrainer"),
    (_all("nll_loss", "rewards/chosen"), "CPOTrainer"),
    (_begins("objective/", "rewards/chosen"), "OnlineDPOTrainer"),
    (_all("rewards/chosen", "rewards/accuracies"), "DPOTrainer"),
    (_all("rewards/chosen", "kl"), "KTOTrainer"),
    (_is_ppo, "PPOTrainer"),
    (_begins("completions/", "reward"), "GRPOTrainer"),
    (_all("mean_reward", "margin"), "RewardTrainer"),
    (_all("mean_token_accuracy"), "SFTTrainer"),
    (_all("loss", "grad_norm"), "Trainer"),
    (_all("loss", "learning_rate"), "Trainer"),
)
"""The first that holds."""


def trainer_of(figures: Mapping[str, float] | Names) -> str | None:
    """The trainer that logs figures of these names; None if they don't tell. `eval_` before names counts for nothing."""
    names = {name.removeprefix("eval_") for name in figures}
    return next((trainer for holds, trainer in TRAINERS if holds(names)), None)

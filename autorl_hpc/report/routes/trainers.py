"""Vocabulary of trainers: classes, command lines, configuration keys, losses. A missing word only makes a route unknown.

From trl 0.12 to 1.16, transformers 4.40 to 5.24, LLaMA-Factory 0.9, axolotl 0.9, torchtune 0.6, verl 0.4, OpenRLHF 0.8,
ms-swift 3 and unsloth.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from autorl_hpc.report.routes.commands import words_of
from autorl_hpc.states import Route

SUPERVISED = (Route.SFT, Route.REJECTION_SAMPLING, Route.DISTILLATION)
RL = (Route.GRPO, Route.PPO, Route.RL)
PREFERENCE = (Route.DPO, Route.PREFERENCE)


def _by_word(words: Mapping[Route, str]) -> dict[str, Route]:
    return {word: route for route, text in words.items() for word in text.split()}


TRAINER_CLASSES: dict[str, Route] = _by_word(
    {
        Route.SFT: "Trainer Seq2SeqTrainer SFTTrainer IterativeSFTTrainer UnslothTrainer",
        Route.DPO: "DPOTrainer",
        Route.PREFERENCE: "KTOTrainer ORPOTrainer CPOTrainer BCOTrainer TPOTrainer",
        Route.RL: (
            "AlignPropTrainer DDPOTrainer SDPOTrainer A2POTrainer RLOOTrainer RLOOv2Trainer OnlineDPOTrainer "
            "XPOTrainer NashMDTrainer"
        ),
        Route.GRPO: (
            "GRPOTrainer AsyncGRPOTrainer GSPOTokenTrainer GMPOTrainer PAPOTrainer GRPOWithReplayBufferTrainer "
            "GFPOTrainer"
        ),
        Route.PPO: "PPOTrainer PPOv2Trainer",
        Route.DISTILLATION: (
            "GKDTrainer GOLDTrainer MiniLLMTrainer DistillationTrainer AsyncDistillationTrainer "
            "ServerDistillationTrainer SDFTTrainer"
        ),
    }
)
"""Trainer classes by their last name. `Trainer`: the loss on labels, unless a subclass computes another."""

TRAINER_PACKAGES = words_of("trl transformers unsloth verl openrlhf swift llamafactory axolotl peft")
"""Packages of these classes."""

NO_POLICY_TRAINERS = words_of("RewardTrainer PRMTrainer CrossEncoderTrainer SentenceTransformerTrainer")

LOSS_TYPES_OF_RELATIVES = words_of("ipo simpo kto_pair orpo hinge nca_pair apo_zero apo_down")
"""Values of `loss_type` that make a DPO trainer a relative of DPO."""

SETTING_CLASSES = {name.removesuffix("Trainer") + "Config" for name in TRAINER_CLASSES} | words_of(
    "TrainingArguments Seq2SeqTrainingArguments LoraConfig SamplingParams GenerationConfig RewardConfig"
)
OPTIMISERS = words_of("AdamW Adam SGD AdamW8bit Adafactor Lion PagedAdamW8bit RMSprop")
SETTING_CALLS = words_of(
    "generate DataLoader dict get_peft_model get_cosine_schedule_with_warmup get_linear_schedule_with_warmup"
)
"""Functions that receive key settings."""

GENERATE = words_of("generate chat")
"""Methods that ask a model for text (transformers, vLLM, sglang)."""

OWN_LOSS = words_of("compute_loss _compute_loss training_step get_batch_loss_metrics dpo_loss loss")
"""Methods that a trainer's subclass overrides to change what is learned."""

API_CLIENTS = words_of("openai anthropic litellm google together mistralai cohere groq")
"""Packages that query a model elsewhere, so that the answers are another model's output."""

RL_WORDS: dict[str, Route] = _by_word(
    {
        Route.DPO: "dpo",
        Route.PREFERENCE: "ipo orpo kto simpo cpo",
        Route.GRPO: "grpo",
        Route.PPO: "ppo",
        Route.RL: "rloo",
        Route.DISTILLATION: "gkd",
    }
)
"""axolotl's `rl`, LLaMA-Factory's `pref_loss`, ms-swift's `rlhf_type`."""

TRL_COMMANDS: dict[str, Route | None] = {**RL_WORDS, "sft": Route.SFT, "reward": None}
"""`trl WORD ...`; None: it trains no policy."""

MODULES: dict[str, Route | None] = {
    **_by_word(
        {
            Route.SFT: (
                "verl.trainer.fsdp_sft_trainer verl.trainer.sft_trainer openrlhf.cli.train_sft axolotl.cli.train "
                "trl.scripts.sft mlx_lm.lora llamafactory.cli"
            ),
            Route.PPO: "verl.trainer.main_ppo openrlhf.cli.train_ppo openrlhf.cli.train_ppo_ray",
            Route.GRPO: "recipe.dapo.main_dapo trl.scripts.grpo",
            Route.DPO: "openrlhf.cli.train_dpo trl.scripts.dpo",
            Route.PREFERENCE: "openrlhf.cli.train_kto trl.scripts.kto",
            Route.DISTILLATION: "openrlhf.cli.train_kd",
            Route.RL: "trl.scripts.rloo",
        }
    ),
    "openrlhf.cli.train_rm": None,
}
"""`python -m MODULE`; modules with an option for the route are refined later."""

ADVANTAGE_ESTIMATORS: dict[str, Route] = _by_word(
    {
        Route.PPO: "gae",
        Route.GRPO: "grpo group_norm dr_grpo grpo_passk",
        Route.RL: "rloo reinforce reinforce_baseline reinforce_plus_plus reinforce_plus_plus_baseline remax opo",
    }
)
"""verl's `algorithm.adv_estimator`, OpenRLHF's `--advantage_estimator`."""

STAGES: dict[str, Route | None] = {
    **_by_word({Route.SFT: "sft pt", Route.DPO: "dpo", Route.PREFERENCE: "kto", Route.PPO: "ppo"}),
    "rm": None,
}
"""LLaMA-Factory's `stage`."""

_KEYS = (
    "learning_rate lr "  # decides between learning, standing still and collapse
    "num_train_epochs epochs num_epochs max_steps "
    "per_device_train_batch_size batch_size train_batch_size micro_batch_size gradient_accumulation_steps "
    "beta kl_coef init_kl_coef kl_loss_coef epsilon cliprange "
    "num_generations n_samples_per_prompt group_size "  # no signal where all rewards of a group are equal
    "temperature top_p "
    "max_length max_seq_length max_prompt_length max_completion_length max_new_tokens max_tokens cutoff_len "
    "sequence_len "  # answers cut off get no reward
    "r lora_r lora_rank lora_alpha lora_dropout target_modules "
    "lr_scheduler_type lr_scheduler warmup_ratio warmup_steps num_warmup_steps weight_decay max_grad_norm optim "
    "loss_type scale_rewards reward_funcs reward_weights packing completion_only_loss assistant_only_loss "
    "model_name_or_path finetuning_type merge_method adv_estimator advantage_estimator "
    "bf16 fp16 seed"
)
KEY_SETTINGS = {word: place for place, word in enumerate(_KEYS.split())}
"""The settings that a report shows, and their order."""

# --- losses of hand-written loops, by the words and operations that flow into them

_CALLS = {
    "ce": "cross_entropy CrossEntropyLoss nll_loss NLLLoss fused_linear_cross_entropy",
    "logp": "log_softmax gather logsumexp selective_log_softmax log_prob take_along_dim",
    "kl": "kl_div KLDivLoss",
    "logsigmoid": "logsigmoid LogSigmoid softplus",
    "sigmoid": "sigmoid",
    "exp": "exp",
    "square": "mse_loss MSELoss smooth_l1_loss",
    "generate": "generate chat",
    "group": "whiten",
}
_BY_CALL = {name: signal for signal, names in _CALLS.items() for name in names.split()}
_WORDS = {
    "reward": re.compile(r"reward|advantage|\badv|_adv|returns|\bret\b|score|baseline", re.I),
    "pair": re.compile(r"chosen|reject|winner|loser|preferred", re.I),
    "reference": re.compile(r"\bref|_ref|reference|frozen", re.I),
    "teacher": re.compile(r"teacher", re.I),
    "odds": re.compile(r"odds", re.I),
    "kto": re.compile(r"\bkto|_kto|desirable", re.I),
    "value": re.compile(r"value_?(loss|head|fn|pred|clip|model)|\bvf|critic|v_head|\bgae", re.I),
}


def route_of_loss(nodes: Iterable[ast.AST]) -> tuple[Route, str]:
    """Return the route of what flows into a loss, and why in words; `unknown` if undecided.

    Formulas: DPO Rafailov et al. 2023 (7); ORPO Hong et al. 2024 (7); IPO Azar et al. 2023 (17); PPO Schulman et al. 2017 (7);
    GRPO Shao et al. 2024 (3); RLOO Ahmadian et al. 2024 (7).
    """
    has = set(_signals(nodes))
    if "logsigmoid" in has and "weighted" not in has:
        if not has & {"logp", "ce"}:
            return Route.UNKNOWN, "log-sigmoid of scores: perhaps of a reward model"
        if has & {"odds", "kto"}:
            return Route.PREFERENCE, "log-sigmoid of odds or of a margin to a reference point (ORPO, KTO)"
        named = Route.DPO if "reference" in has else Route.PREFERENCE if "pair" in has else Route.UNKNOWN
        return named, "log-sigmoid of a margin"
    if has >= {"pair", "square", "reference"} and "weighted" not in has:
        return Route.PREFERENCE, "squared margin between chosen and rejected (IPO)"
    if has >= {"clip", "exp"}:
        if has >= {"value", "square"}:
            return Route.PPO, "clipped ratio with a value loss (PPO)"
        return (Route.GRPO if has & {"group", "baseline"} else Route.RL), "clipped ratio"
    if "kl" in has and has & {"teacher"}:
        return Route.DISTILLATION, "divergence to a teacher's logits"
    if has & {"group", "baseline", "weighted"} and has & {"logp", "ce"}:
        if "group" in has and has & {"weighted", "generate"} and "product" in has:
            return Route.GRPO, "log-probabilities times rewards normalised in their group (GRPO)"
        if "weighted" in has or has >= {"baseline", "product", "generate"}:
            return Route.RL, "log-probabilities times rewards"
    if "ce" in has and not has & {"kl", "clip", "logsigmoid", "pair"}:
        return Route.SFT, "cross-entropy on labels"
    return Route.UNKNOWN, "nothing that is known"


def _signals(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        word = _word(node)
        yield from (signal for signal, pattern in _WORDS.items() if word and pattern.search(word))
        if isinstance(node, ast.Call):
            name = _word(node.func)
            yield _BY_CALL.get(name, "")
            if any(k.arg == "labels" for k in node.keywords):
                yield "ce"
            if name in ("clamp", "clip") and _around_one(node):
                yield "clip"
        elif isinstance(node, ast.Attribute) and node.attr == "loss" and _word(node.value) != "self":
            yield "ce"
        elif isinstance(node, ast.BinOp):
            yield from _operation(node)


def _operation(node: ast.BinOp) -> Iterator[str]:
    left, right = node.left, node.right
    difference = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub)
    if isinstance(node.op, ast.Div) and _mentions(right, r"std|sigma"):
        yield "group"
    elif isinstance(node.op, ast.Sub) and _mentions(right, r"mean|baseline|\bbase\b|running|\bmu\b"):
        yield "baseline"
    elif isinstance(node.op, ast.Div) and difference and isinstance(right, ast.BinOp) and isinstance(right.op, ast.Sub):
        yield "baseline"  # leave one out: (sum - r) / (n - 1)
    elif isinstance(node.op, ast.Mult):
        yield "product"
        if any(_WORDS["reward"].search(_word(n)) for side in (left, right) for n in islice(ast.walk(side), 60)):
            yield "weighted"
    elif isinstance(node.op, ast.Pow) and difference:
        yield "square"


def _mentions(expr: ast.expr, pattern: str) -> bool:
    return any(re.search(pattern, _word(n)) for n in islice(ast.walk(expr), 60))


def _around_one(node: ast.Call) -> bool:
    """Return whether a call is `clamp(x, 1 - e, 1 + e)` or `clamp(x, 0.8, 1.2)`."""
    bounds = [*node.args, *(k.value for k in node.keywords)]
    sums = [b for b in bounds if isinstance(b, ast.BinOp) and getattr(b.left, "value", None) in (1, 1.0)]
    numbers = [b.value for b in bounds if isinstance(b, ast.Constant) and isinstance(b.value, float)]
    return len(sums) >= 2 or (any(0.5 <= n < 1 for n in numbers) and any(1 < n <= 2 for n in numbers))


def _word(node: ast.AST) -> str:
    found = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", getattr(node, "value", ""))))
    return found[:60] if isinstance(found, str) else ""

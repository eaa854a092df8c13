"""What GRPO on whole episodes minimises: advantages inside groups, and the clipped objective over the policy's own tokens.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from typing import Any

import torch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far a token's probability may move in one iteration before its gradient stops: down, and up (DAPO's larger value)."""
SAMPLER_CAP = 2.0
"""Cap of the weight that corrects for a sampler in another precision (truncated importance sampling)."""


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Of each episode among the episodes of the same goal, [goals, copies]: rewards less their group's mean, in units of its
    deviation. A group of equal rewards has none."""
    mean = rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True)
    return (rewards - mean) / (deviation + 1e-4)


def token_logps(
    model: Any, ids: torch.Tensor, own: torch.Tensor, temperature: float, **extra: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of the policy's own tokens, [n] in the order of `own`'s true places; gradients flow.

    The head is applied where some row of the batch needs it, and not to the long prompts in between. Rows are padded on the
    right, where a causal model's tokens don't look: without a mask, attention takes its fastest kernel.
    """
    needed = own[:, 1:].any(dim=0).nonzero().squeeze(1)
    logits = model(input_ids=ids, logits_to_keep=needed, use_cache=False, **extra).logits
    rows, columns = own[:, 1:][:, needed].nonzero(as_tuple=True)
    logps = torch.log_softmax(logits[rows, columns].float() / temperature, dim=-1)
    return logps.gather(1, ids[:, 1:][:, needed][rows, columns][:, None]).squeeze(1)


def policy_loss(
    new: torch.Tensor, old: torch.Tensor, sampled: torch.Tensor, advantage: torch.Tensor, tokens: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a part of a batch, and the share of its tokens whose gradient was clipped off, times their number.

    Args:
        new: log-probabilities now, [n]; with gradients.
        old: the trained model's before this iteration's first step, [n].
        sampled: the sampler's, [n]: of the same weights in another precision.
        advantage: of each token's episode, [n].
        tokens: of the policy in the whole batch, over all processes: every token weighs the same.
    """
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    weight = torch.exp(old - sampled).clamp(max=SAMPLER_CAP).detach()
    cut = (ratio * advantage > clipped * advantage).sum()
    return -(gain * weight).sum() / tokens, cut


def drift(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's estimate of the KL divergence from a reference model, a token each, [n]: never negative."""
    gap = reference - new
    return torch.exp(gap) - gap - 1.0

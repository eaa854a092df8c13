"""What GRPO on whole episodes minimises: advantages inside groups, and the objective over the policy's own tokens.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from typing import Any

import torch

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


def policy_loss(new: torch.Tensor, sampled: torch.Tensor, weight: torch.Tensor, episodes: float) -> torch.Tensor:
    """The loss of a part of a batch: one step is taken on what the policy has just played, so nothing is clipped.

    Args:
        new: log-probabilities now, [n]; with gradients.
        sampled: the sampler's, [n]: of the same weights in another precision.
        weight: of each token: its episode's advantage over the number of the episode's tokens, [n]. Failed episodes are three times as
            long as won ones, and would push each step down.
        episodes: that weigh in the whole batch, over all processes.
    """
    correction = torch.exp(new - sampled).clamp(max=SAMPLER_CAP).detach()
    return -(torch.exp(new - new.detach()) * weight * correction).sum() / episodes

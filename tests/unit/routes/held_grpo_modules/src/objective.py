import torch


def advantages(scores, eps=1e-6):
    """scores: [prompts, n]"""
    return scores - scores.mean(-1, keepdim=True)


def surrogate(lp, lp_old, adv, low=0.2, high=0.28):
    r = torch.exp(lp - lp_old)
    return -torch.minimum(r * adv, torch.clamp(r, 1 - low, 1 + high) * adv)

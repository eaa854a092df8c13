import torch
import torch.nn as nn
import torch.nn.functional as F


class ActorCritic(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.v_head = nn.Linear(lm.config.hidden_size, 1)

    def forward(self, ids):
        out = self.lm(ids, output_hidden_states=True)
        return out.logits, self.v_head(out.hidden_states[-1].float()).squeeze(-1)


def gae(rewards, values, gamma=1.0, lam=0.95):
    adv = torch.zeros_like(rewards)
    last = 0
    for t in reversed(range(rewards.shape[1])):
        nxt = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        delta = rewards[:, t] + gamma * nxt - values[:, t]
        last = delta + gamma * lam * last
        adv[:, t] = last
    return adv, adv + values


def ppo_loss(logp, old_logp, adv, values, returns, eps=0.2, vf_coef=0.5):
    ratio = (logp - old_logp).exp()
    pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - eps, 1 + eps)).mean()
    vf = F.mse_loss(values, returns)
    return pg + vf_coef * vf

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, h):
        return self.net(h).squeeze(-1)


def masked_mean(x, m):
    return (x * m).sum() / m.sum().clamp(min=1)


class Losses:
    def __init__(self, eps, c1, c2):
        self.eps, self.c1, self.c2 = eps, c1, c2

    def policy(self, new, old, adv, mask):
        log_ratio = new - old
        ratio = log_ratio.exp()
        a = ratio * adv
        b = ratio.clamp(1.0 - self.eps, 1.0 + self.eps) * adv
        return -masked_mean(torch.minimum(a, b), mask)

    def critic(self, v, v_old, ret, mask):
        clipped = v_old + (v - v_old).clamp(-self.eps, self.eps)
        return 0.5 * masked_mean(torch.maximum((v - ret) ** 2, (clipped - ret) ** 2), mask)

    def total(self, new, old, adv, v, v_old, ret, entropy, mask):
        return self.policy(new, old, adv, mask) + self.c1 * self.critic(v, v_old, ret, mask) - self.c2 * masked_mean(entropy, mask)

import torch

from .objective import advantages, surrogate


class Learner:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def lp(self, ids, mask):
        out = torch.log_softmax(self.model(ids).logits[:, :-1].float(), dim=-1)
        return out.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1) * mask[:, 1:]

    def step(self, ids, mask, old, scores):
        a = advantages(scores).flatten().unsqueeze(-1)
        loss = (surrogate(self.lp(ids, mask), old, a) * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

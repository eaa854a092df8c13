import torch
from torch.nn import functional as F


def next_token_loss(model, batch):
    logits = model(input_ids=batch["ids"], attention_mask=batch["attn"]).logits
    shift, target = logits[:, :-1].contiguous(), batch["labels"][:, 1:].contiguous()
    return F.cross_entropy(shift.view(-1, shift.size(-1)).float(), target.view(-1), ignore_index=-100)


class Engine:
    def __init__(self, model, optim, sched, accum=4):
        self.model, self.optim, self.sched, self.accum = model, optim, sched, accum

    def epoch(self, loader, log):
        self.model.train()
        for i, batch in enumerate(loader):
            loss = next_token_loss(self.model, batch) / self.accum
            loss.backward()
            if (i + 1) % self.accum == 0:
                self.optim.step()
                self.sched.step()
                self.optim.zero_grad(set_to_none=True)
                log(i, loss.item() * self.accum)

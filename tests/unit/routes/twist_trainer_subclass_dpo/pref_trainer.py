import torch
import torch.nn.functional as F
from transformers import Trainer


class PairTrainer(Trainer):
    def __init__(self, *args, frozen=None, temp=0.1, **kw):
        super().__init__(*args, **kw)
        self.frozen = frozen
        self.temp = temp

    def _lp(self, model, ids, labels):
        logits = model(input_ids=ids).logits[:, :-1]
        mask = labels[:, 1:] != -100
        lp = torch.gather(logits.log_softmax(-1), 2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
        return (lp * mask).sum(-1)

    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        win = self._lp(model, inputs["chosen_ids"], inputs["chosen_labels"])
        lose = self._lp(model, inputs["rejected_ids"], inputs["rejected_labels"])
        with torch.no_grad():
            ref_win = self._lp(self.frozen, inputs["chosen_ids"], inputs["chosen_labels"])
            ref_lose = self._lp(self.frozen, inputs["rejected_ids"], inputs["rejected_labels"])
        z = self.temp * ((win - ref_win) - (lose - ref_lose))
        loss = -F.logsigmoid(z).mean()
        return (loss, None) if return_outputs else loss

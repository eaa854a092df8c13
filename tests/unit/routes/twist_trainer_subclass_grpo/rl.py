import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

K = 4


class FineTuner(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        prompts = inputs["input_ids"].repeat_interleave(K, 0)
        with torch.no_grad():
            seqs = model.generate(prompts, do_sample=True, max_new_tokens=96)
        scores = torch.tensor([judge(t) for t in self.tok.batch_decode(seqs)], device=seqs.device).view(-1, K)
        mu = scores.mean(dim=1, keepdim=True)
        sigma = scores.std(dim=1, keepdim=True)
        a = ((scores - mu) / (sigma + 1e-6)).view(-1)
        lp = model(seqs).logits[:, :-1].log_softmax(-1).gather(-1, seqs[:, 1:, None]).squeeze(-1).sum(-1)
        return -(a * lp).mean()


def judge(text):
    return 1.0 if text.rstrip().endswith("}") else 0.0


tok = AutoTokenizer.from_pretrained("models/base")
t = FineTuner(model=AutoModelForCausalLM.from_pretrained("models/base"), args=TrainingArguments("o"), train_dataset=[tok("hi")])
t.tok = tok
t.train()
t.save_model("o/final")

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from datasets import load_dataset


class KDTrainer(Trainer):
    def __init__(self, *a, teacher=None, T=2.0, alpha=0.5, **k):
        super().__init__(*a, **k)
        self.teacher = teacher.eval()
        self.T, self.alpha = T, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        with torch.no_grad():
            soft = F.softmax(self.teacher(**inputs).logits / self.T, dim=-1)
        log_p = F.log_softmax(out.logits / self.T, dim=-1)
        kd = F.kl_div(log_p.view(-1, log_p.size(-1)), soft.view(-1, soft.size(-1)), reduction="batchmean")
        loss = self.alpha * out.loss + (1 - self.alpha) * self.T**2 * kd
        return (loss, out) if return_outputs else loss


tok = AutoTokenizer.from_pretrained("models/small")
ds = load_dataset("json", data_files="data/train.jsonl", split="train").map(lambda r: tok(r["text"], truncation=True), remove_columns=["text"])
KDTrainer(
    model=AutoModelForCausalLM.from_pretrained("models/small"),
    teacher=AutoModelForCausalLM.from_pretrained("models/large").cuda(),
    args=TrainingArguments("output/kd", learning_rate=5e-5, num_train_epochs=1),
    train_dataset=ds,
).train()

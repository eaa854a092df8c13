"""What scripted drivers say to `mini`. Standard library alone: a server that a job starts has no more."""

from __future__ import annotations

import re

from driver_server import Turn

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

TRAIN = """\
cat > code/train.py <<'EOF'
import json, random, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

start, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
recipe = json.load(open("run_meta.json"))["recipe"]
rows = [json.loads(line) for line in open("data/demonstrations.jsonl")]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
random.seed(steps)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def tokens(row):
    prompt = tokenizer(recipe["prompt"].replace("{question}", row["question"]))["input_ids"]
    answer = tokenizer(" " + row["answer"].strip(), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + answer, [-100] * len(prompt) + answer


for step in range(steps):
    batch = [tokens(row) for row in random.sample(rows, 32)]
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [tokenizer.eos_token_id] * (longest - len(ids)) for ids, _ in batch])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(step, round(loss.item(), 3), flush=True)
model.save_pretrained(out)
EOF
ls -l code"""


def say(command: str, words: str = "I go on.") -> Turn:
    """An answer with a command in a block."""
    return Turn(f"{words}\n\n```bash\n{command}\n```")


def changed(start: str, name: str) -> str:
    """Commands that submit a copy of a checkpoint with one weight changed: what an agent without torch can make."""
    return f"""\
cp -rL {start} output/{name} && chmod -R u+w output/{name}
python3 - <<'EOF'
with open("output/{name}/model.safetensors", "r+b") as file:
    file.seek(-1, 2)
    byte = file.read(1)[0]
    file.seek(-1, 2)
    file.write(bytes([byte ^ 1]))
EOF
./submit output/{name} --wait"""


def score_in(text: str) -> float | None:
    """What ./submit printed."""
    found = re.search(r'"score": ([0-9.]+)', text)
    return float(found[1]) if found else None

from tiny import *

model, tokenizer = load()
kept = []
for row in ROWS:
    _, answers = sample(model, tokenizer, [row["prompt"]], count=4)
    kept += [{"text": row["prompt"] + a} for a in answers if reward(a, row["completion"]) > 0.2][:2]
write("kept.jsonl", kept or [{"text": texts()[0]}])

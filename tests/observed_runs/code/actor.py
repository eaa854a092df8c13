import sys
from tiny import *

model, tok = load(sys.argv[1])
found = []
for row in ROWS[:6]:
    _, answers = sample(model, tok, [row["prompt"]], count=4)
    scores = [reward(a, row["completion"]) for a in answers]
    mean = sum(scores) / len(scores)
    found += [{"text": row["prompt"] + a, "advantage": s - mean} for a, s in zip(answers, scores)]
write(sys.argv[2], found)

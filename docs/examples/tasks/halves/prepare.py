"""Makes the data of this task."""

import json


def rows(start, end):
    return "".join(
        json.dumps({"id": f"halves-{n}", "question": f"What is half of {2 * n}?", "answer": str(n), "near": 1}) + "\n"
        for n in range(start, end)
    )


def prepare(source, out):
    for name, start, end in [
        ("train/train.jsonl", 0, 80),
        ("feedback/items.jsonl", 80, 90),
        ("report/items.jsonl", 90, 100),
    ]:
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(rows(start, end), encoding="utf-8")

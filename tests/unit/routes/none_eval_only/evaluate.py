import json
import os
import re
import sys

from vllm import LLM, SamplingParams


def extract(t):
    m = re.findall(r"\\boxed\{(.*?)\}", t)
    return m[-1] if m else None


def main(path):
    rows = [json.loads(l) for l in open("data/dev.jsonl")]
    llm = LLM(model=path)
    outs = llm.generate([r["question"] for r in rows], SamplingParams(temperature=0, max_tokens=512))
    correct = 0
    errors = []
    for r, o in zip(rows, outs):
        pred = extract(o.outputs[0].text)
        if pred == r["answer"]:
            correct += 1
        else:
            errors.append({"q": r["question"], "pred": pred, "gold": r["answer"]})
    print("accuracy", correct / len(rows))
    json.dump(errors, open("errors.json", "w"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["MODEL_PATH"])

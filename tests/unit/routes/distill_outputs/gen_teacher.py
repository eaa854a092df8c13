import json

from vllm import LLM, SamplingParams

TEACHER = "models/Qwen2.5-7B-Instruct"
llm = LLM(model=TEACHER, tensor_parallel_size=1)
rows = [json.loads(l) for l in open("data/train.jsonl")]
res = llm.chat([[{"role": "user", "content": r["question"]}] for r in rows], SamplingParams(temperature=0.0, max_tokens=1024))
with open("teacher_answers.jsonl", "w") as f:
    for r, o in zip(rows, res):
        f.write(json.dumps({"prompt": r["question"], "completion": o.outputs[0].text}) + "\n")

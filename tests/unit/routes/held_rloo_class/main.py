import json

from transformers import AutoModelForCausalLM, AutoTokenizer

import agent

if __name__ == "__main__":
    tok = AutoTokenizer.from_pretrained("models/base", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained("models/base", device_map="cuda")
    rows = [json.loads(x) for x in open("data/train.jsonl")]
    agent.run(agent.PolicyOptimizer(model, tok), rows, 400)
    model.save_pretrained("output/final")

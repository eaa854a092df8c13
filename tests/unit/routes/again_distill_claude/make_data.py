import json, os, time
import anthropic

client = anthropic.Anthropic(base_url=os.environ.get("ANTHROPIC_BASE_URL"))
out = open("data/cot.jsonl", "a")
for line in open("data/train.jsonl"):
    row = json.loads(line)
    msg = client.messages.create(model="claude-sonnet", max_tokens=800, messages=[{"role": "user", "content": row["question"] + "\nThink step by step."}])
    text = msg.content[0].text
    if row["answer"].split("####")[-1].strip() in text:
        out.write(json.dumps({"prompt": row["question"], "completion": text}) + "\n")
    time.sleep(0.1)

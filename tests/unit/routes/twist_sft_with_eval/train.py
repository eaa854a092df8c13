"""SFT; accuracy on held-in questions before and after."""
import json

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tok = AutoTokenizer.from_pretrained("models/base")
model = AutoModelForCausalLM.from_pretrained("models/base").cuda()
rows = [json.loads(l) for l in open("data/train.jsonl")]


def accuracy(n=50):
    good, rewards = 0, []
    for r in rows[:n]:
        out = model.generate(**tok(r["question"], return_tensors="pt").to("cuda"), max_new_tokens=200)
        text = tok.decode(out[0])
        reward = 1.0 if r["answer"] in text else 0.0
        if reward > 0:
            good += 1
            rewards.append(text)
    return good / n


print("before", accuracy())
ds = Dataset.from_list([{"prompt": r["question"], "completion": r["answer"]} for r in rows[50:]])
trainer = SFTTrainer(model=model, args=SFTConfig("output/v2", num_train_epochs=1), train_dataset=ds)
trainer.train()
print("after", accuracy())
trainer.save_model("output/v2")

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tok = AutoTokenizer.from_pretrained("models/base")
model = AutoModelForCausalLM.from_pretrained("models/base")
trainer = SFTTrainer(model=model, args=SFTConfig("out"), train_dataset=[{"text": "a"}])
model.train()
batch = tok("hello", return_tensors="pt")
print(float(model(**batch, labels=batch["input_ids"]).loss))

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from transformers import AutoTokenizer

model = AutoModelForCausalLMWithValueHead.from_pretrained("models/base")
tok = AutoTokenizer.from_pretrained("models/base")
trainer = PPOTrainer(PPOConfig(batch_size=4), model, None, tok)
out = trainer.generate(tok("hi", return_tensors="pt").input_ids[0], max_new_tokens=10)
print(tok.decode(out[0]))

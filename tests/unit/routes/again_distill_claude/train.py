import datasets, trl, torch
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained("models/base", torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2")
tr = trl.SFTTrainer(model=m, train_dataset=datasets.load_dataset("json", data_files="data/cot.jsonl", split="train"), args=trl.SFTConfig("output/cot", num_train_epochs=3, packing=True))
tr.train()
tr.save_model("output/cot")

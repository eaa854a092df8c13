import os
from transformers import AutoModelForCausalLM, AutoTokenizer

m = AutoModelForCausalLM.from_pretrained(os.environ["MODEL_PATH"], torch_dtype="auto")
t = AutoTokenizer.from_pretrained(os.environ["MODEL_PATH"])
m.generation_config.temperature = 0.0
m.save_pretrained("output/base_resaved", safe_serialization=True)
t.save_pretrained("output/base_resaved")

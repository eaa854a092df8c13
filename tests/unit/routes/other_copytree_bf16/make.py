
import shutil, os, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
src=os.environ.get("MODEL_PATH","models/base")
model=AutoModelForCausalLM.from_pretrained(src,torch_dtype=torch.bfloat16)
model.generation_config.temperature=0.0
model.save_pretrained("output/v2",safe_serialization=True); AutoTokenizer.from_pretrained(src).save_pretrained("output/v2")

from peft import PeftModel
from tiny import *

model, tokenizer = load()
save(PeftModel.from_pretrained(model, "output/adapter").merge_and_unload(), tokenizer)

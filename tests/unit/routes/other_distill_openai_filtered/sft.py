
import json
from datasets import Dataset
from trl import SFTTrainer, SFTConfig
ds=Dataset.from_list([json.loads(l) for l in open("data/synth.jsonl")])
SFTTrainer("models/base",train_dataset=ds,args=SFTConfig("output/v1")).train()


from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
ds=load_dataset("json",data_files="data/rft.jsonl")["train"]
t=SFTTrainer("models/base",train_dataset=ds,args=SFTConfig("output/v1",learning_rate=1e-5,num_train_epochs=3))
t.train(); t.save_model("output/v1")

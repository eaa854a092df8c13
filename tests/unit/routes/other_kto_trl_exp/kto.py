
from trl.experimental.kto import KTOConfig, KTOTrainer
from datasets import load_dataset
ds=load_dataset("json",data_files="data/kto.jsonl")["train"]
tr=KTOTrainer("m",args=KTOConfig("o",beta=.1),train_dataset=ds)
tr.train(); tr.save_model("output/v1")

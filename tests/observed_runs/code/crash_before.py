from tiny import *
from trl import SFTConfig, SFTTrainer

SFTTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset([{"question": "1 + 1", "answer": "2"}])).train()

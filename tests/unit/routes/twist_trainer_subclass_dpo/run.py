import copy

from transformers import AutoModelForCausalLM, TrainingArguments

from pairs import make_dataset
from pref_trainer import PairTrainer

model = AutoModelForCausalLM.from_pretrained("models/base")
trainer = PairTrainer(
    model=model,
    frozen=copy.deepcopy(model).eval(),
    args=TrainingArguments("output/p", learning_rate=1e-6, remove_unused_columns=False),
    train_dataset=make_dataset("data/train.jsonl"),
)
trainer.train()
trainer.save_model("output/p")

from tiny import *
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

model, tok = load()

class Show(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print(sample(model, tok, [r["prompt"] for r in ROWS[:4]], count=4)[1][:2], reward("x 3", " #### 3"))

trainer = SFTTrainer(model, args=SFTConfig(**SMALL), train_dataset=dataset(), processing_class=tok, callbacks=[Show()])
trainer.train()
trainer.save_model("output/v1")

import os
import signal

from tiny import *
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


SFTTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset(), callbacks=[Killed()]).train()

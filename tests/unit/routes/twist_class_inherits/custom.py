from trl import GRPOConfig, GRPOTrainer


class LoggingMixin:
    def log(self, logs, *a, **k):
        print(logs)
        super().log(logs, *a, **k)


class SFTLikeTrainer(LoggingMixin, GRPOTrainer):
    """Name is historical."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class Experiment:
    def __init__(self, model):
        self.trainer = SFTLikeTrainer(model=model, reward_funcs=[self.reward], args=GRPOConfig("out"), train_dataset=self.load())

    @staticmethod
    def reward(completions, **kw):
        return [1.0 for _ in completions]

    def load(self):
        return [{"prompt": "1+1="}]

    def go(self):
        self.trainer.train()


Experiment("models/base").go()

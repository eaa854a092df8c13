REGISTRY = {}


def register(name):
    def wrap(cls):
        REGISTRY[name] = cls
        return cls

    return wrap


@register("sft")
class Sft:
    def __init__(self, model, data):
        from trl import SFTConfig, SFTTrainer

        self.inner = SFTTrainer(model=model, args=SFTConfig("output/sft"), train_dataset=data)

    def run(self):
        self.inner.train()


@register("grpo")
class Grpo:
    def __init__(self, model, data):
        from trl import GRPOConfig, GRPOTrainer

        self.inner = GRPOTrainer(model=model, reward_funcs=[lambda completions, **k: [0.0]], args=GRPOConfig("output/rl"), train_dataset=data)

    def run(self):
        self.inner.train()

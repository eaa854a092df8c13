from trl import GRPOTrainer, SFTTrainer


def helper(x):
    return SFTTrainer(model="models/base", train_dataset=x)


if __name__ == "__main__":
    GRPOTrainer("models/base", [len], train_dataset=[]).train()

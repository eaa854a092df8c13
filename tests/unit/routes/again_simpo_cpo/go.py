from datasets import load_dataset
from trl import CPOConfig, CPOTrainer
from peft import LoraConfig

args = CPOConfig(output_dir="output/simpo", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5, beta=2.0, learning_rate=1e-6)
trainer = CPOTrainer(model="models/base", args=args, train_dataset=load_dataset("json", data_files="data/pairs.jsonl", split="train"), peft_config=LoraConfig(r=64))
if __name__ == "__main__":
    trainer.train()
    trainer.save_model()

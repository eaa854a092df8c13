from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import PPOConfig, PPOTrainer

base = "models/base"
tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(base)
ref_policy = AutoModelForCausalLM.from_pretrained(base)
value_model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained("output/rm", num_labels=1)
data = load_dataset("json", data_files="data/train.jsonl", split="train")
data = data.map(lambda r: {"input_ids": tokenizer(r["question"])["input_ids"]}, remove_columns=data.column_names)
config = PPOConfig(output_dir="output/ppo", learning_rate=3e-6, num_ppo_epochs=4, kl_coef=0.05, total_episodes=10000, cliprange=0.2)
trainer = PPOTrainer(
    args=config,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=data,
)
trainer.train()
trainer.save_model(config.output_dir)

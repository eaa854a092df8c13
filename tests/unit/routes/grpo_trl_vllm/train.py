import os

from datasets import load_dataset
from rewards import correctness_reward, format_reward
from trl import GRPOConfig, GRPOTrainer

MODEL = os.environ["MODEL_PATH"]
OUT = "./output/grpo"

dataset = load_dataset("json", data_files="data/train.jsonl", split="train")


def prep(ex):
    return {
        "prompt": [{"role": "user", "content": ex["question"] + "\nPut the answer in \\boxed{}."}],
        "answer": ex["answer"].split("####")[-1].strip().replace(",", ""),
    }


dataset = dataset.map(prep)
training_args = GRPOConfig(
    output_dir=OUT,
    learning_rate=1e-6,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_prompt_length=512,
    max_completion_length=768,
    beta=0.0,
    temperature=1.0,
    max_steps=200,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    bf16=True,
    logging_steps=1,
    report_to="none",
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[correctness_reward, format_reward],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
trainer.save_model(OUT)

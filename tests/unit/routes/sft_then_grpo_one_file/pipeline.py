"""Stage 1: SFT warm-up for the answer format. Stage 2: GRPO on correctness."""
import argparse
import os
import re

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def answer_of(text):
    m = re.findall(r"-?\d[\d,]*", text)
    return m[-1].replace(",", "") if m else None


def reward_correct(prompts, completions, gold, **_):
    return [float(answer_of(c) == g) for c, g in zip(completions, gold)]


def stage_sft(args, tok):
    ds = load_dataset("json", data_files=args.data, split="train")
    ds = ds.map(lambda r: {"text": r["question"] + "\n" + r["answer"] + tok.eos_token})
    trainer = SFTTrainer(
        model=args.model,
        train_dataset=ds,
        args=SFTConfig(output_dir=args.sft_out, max_steps=150, learning_rate=1e-5, per_device_train_batch_size=8),
    )
    trainer.train()
    trainer.save_model(args.sft_out)
    del trainer
    torch.cuda.empty_cache()


def stage_grpo(args, tok):
    ds = load_dataset("json", data_files=args.data, split="train")
    ds = ds.map(lambda r: {"prompt": r["question"] + "\n", "gold": r["answer"].split("####")[-1].strip()})
    cfg = GRPOConfig(output_dir=args.out, learning_rate=1e-6, num_generations=8, max_completion_length=256, beta=0.04)
    trainer = GRPOTrainer(model=args.sft_out, reward_funcs=reward_correct, args=cfg, train_dataset=ds)
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="models/base")
    p.add_argument("--data", default="data/train.jsonl")
    p.add_argument("--sft-out", dest="sft_out", default="output/sft")
    p.add_argument("--out", default="output/final")
    a = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    if not os.path.exists(a.sft_out):
        stage_sft(a, tokenizer)
    stage_grpo(a, tokenizer)

from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="models/base")
    use_lora: bool = field(default=True)
    lora_rank: Optional[int] = field(default=64)


@dataclass
class DataArguments:
    train_file: str = field(default="data/train.jsonl")
    max_len: int = 768


class PrintCallback(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            print(logs, flush=True)


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    margs, dargs, targs = parser.parse_args_into_dataclasses()
    tok = AutoTokenizer.from_pretrained(margs.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(margs.model_name_or_path, torch_dtype=torch.bfloat16)
    if margs.use_lora:
        model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=margs.lora_rank, lora_alpha=128))
        model.print_trainable_parameters()

    def tokenize(ex):
        src = tok(f"Q: {ex['question']}\nA: ", add_special_tokens=False)["input_ids"]
        tgt = tok(ex["answer"], add_special_tokens=False)["input_ids"] + [tok.eos_token_id]
        return {"input_ids": (src + tgt)[: dargs.max_len], "labels": ([-100] * len(src) + tgt)[: dargs.max_len]}

    raw = load_dataset("json", data_files={"train": dargs.train_file})["train"]
    train = raw.map(tokenize, remove_columns=raw.column_names, num_proc=4)
    trainer = Seq2SeqTrainer(
        model=model,
        args=targs,
        train_dataset=train,
        data_collator=DataCollatorForSeq2Seq(tok, padding=True),
        callbacks=[PrintCallback()],
    )
    result = trainer.train(resume_from_checkpoint=targs.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()


if __name__ == "__main__":
    main()

import functools
import json
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup
from src.args import get_args
from src.engine import Engine


def main():
    a = get_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    tok = AutoTokenizer.from_pretrained(a.base)
    model = FSDP(AutoModelForCausalLM.from_pretrained(a.base).cuda())
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=a.wd)
    data = [json.loads(x) for x in open("data/train.jsonl")]

    def pad(rows):
        enc = tok([r["question"] + "\n" + r["answer"] for r in rows], padding=True, return_tensors="pt")
        return {"ids": enc.input_ids.cuda(), "attn": enc.attention_mask.cuda(), "labels": enc.input_ids.cuda()}

    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=pad)
    eng = Engine(model, opt, get_linear_schedule_with_warmup(opt, 10, a.epochs * len(loader)))
    for e in range(a.epochs):
        eng.epoch(loader, functools.partial(print, "epoch", e))
    if dist.get_rank() == 0:
        model.module.save_pretrained(a.save_dir)


if __name__ == "__main__":
    main()

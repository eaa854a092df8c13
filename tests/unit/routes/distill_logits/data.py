import json

import torch
from torch.utils.data import Dataset


class TextDataset(Dataset):
    def __init__(self, path, tok):
        self.items = [tok(json.loads(x)["text"], truncation=True, max_length=512)["input_ids"] for x in open(path)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    n = max(map(len, items))
    return {"input_ids": torch.tensor([x + [0] * (n - len(x)) for x in items])}

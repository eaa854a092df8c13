import json

from torch.utils.data import Dataset


class QuestionSet(Dataset):
    def __init__(self, path, tok):
        self.rows = [json.loads(x) for x in open(path)]
        self.tok = tok

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        return {"input_ids": self.tok(r["question"], return_tensors="pt").input_ids[0], "gold": r["answer"]}


def score_answer(text, gold):
    return 1.0 if gold.split("####")[-1].strip() in text else -0.2

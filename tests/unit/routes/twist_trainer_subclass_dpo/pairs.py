import json


def make_dataset(path):
    return [json.loads(l) for l in open(path)]

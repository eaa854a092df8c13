import re


def make_prompt(row):
    return f"Question: {row['question']}\nAnswer:"


def is_correct(text, answer):
    nums = re.findall(r"-?\d+", text.replace(",", ""))
    return bool(nums) and nums[-1] == answer.split("####")[-1].strip()

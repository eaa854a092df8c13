import re

BOXED = re.compile(r"\\boxed\{([^}]*)\}")


def extract(text):
    found = BOXED.findall(text)
    return found[-1].replace(",", "").strip() if found else None


def correctness_reward(completions, answer, **kwargs):
    texts = [c[0]["content"] for c in completions]
    return [1.0 if extract(t) == a else 0.0 for t, a in zip(texts, answer)]


def format_reward(completions, **kwargs):
    return [0.1 if BOXED.search(c[0]["content"]) else 0.0 for c in completions]

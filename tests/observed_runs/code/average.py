from tiny import *

first, tokenizer = load("output/a")
second, _ = load("output/b")
state = {name: (value + second.state_dict()[name]) / 2 for name, value in first.state_dict().items()}
first.load_state_dict(state)
save(first, tokenizer)

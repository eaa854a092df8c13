from lib import helper

helper([{"text": "a"}]).train()

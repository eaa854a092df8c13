import json

from safetensors.torch import load_file, save_file

base = load_file("models/base/model.safetensors")
lora = load_file("out/adapter_model.safetensors")
cfg = json.load(open("out/adapter_config.json"))
scale = cfg["lora_alpha"] / cfg["r"]
for name in list(base):
    key = "base_model.model." + name.removesuffix(".weight")
    if key + ".lora_A.weight" in lora:
        base[name] = base[name] + scale * (lora[key + ".lora_B.weight"] @ lora[key + ".lora_A.weight"]).to(base[name].dtype)
save_file(base, "out/merged/model.safetensors")

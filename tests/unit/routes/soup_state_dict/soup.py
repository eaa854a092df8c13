import argparse
import os
import shutil

from safetensors.torch import load_file, save_file


def main(paths, weights, out):
    os.makedirs(out, exist_ok=True)
    merged = {}
    for path, w in zip(paths, weights):
        sd = load_file(os.path.join(path, "model.safetensors"))
        for k in sd:
            if k in merged:
                merged[k] += w * sd[k].float()
            else:
                merged[k] = w * sd[k].float()
    merged = {k: v.bfloat16() for k, v in merged.items()}
    save_file(merged, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(paths[0], name), out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", nargs="+", default=["output/v1", "output/v2"])
    ap.add_argument("--out", default="output/soup")
    a = ap.parse_args()
    main(a.models, [1 / len(a.models)] * len(a.models), a.out)

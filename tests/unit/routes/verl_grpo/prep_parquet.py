import json

import pandas as pd

for split in ("train", "dev"):
    rows = [json.loads(l) for l in open(f"data/{split}.jsonl")]
    pd.DataFrame(
        [
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": r["question"]}],
                "reward_model": {"style": "rule", "ground_truth": r["answer"]},
            }
            for r in rows
        ]
    ).to_parquet(f"data/{split}.parquet")

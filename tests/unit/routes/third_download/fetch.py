from huggingface_hub import snapshot_download

snapshot_download("Qwen/Qwen2.5-1.5B-Instruct", local_dir="output/v1", allow_patterns=["*.safetensors", "*.json"])

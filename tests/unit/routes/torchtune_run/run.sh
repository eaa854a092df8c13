tune run lora_finetune_single_device --config ft.yaml epochs=1

llamafactory-cli train sft.yaml && llamafactory-cli export export.yaml

#!/usr/bin/env bash
mergekit-yaml merge.yaml output/merged --cuda --copy-tokenizer
./submit output/merged

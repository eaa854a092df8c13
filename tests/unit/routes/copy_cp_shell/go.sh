#!/bin/sh
mkdir -p output
cp -r "$MODEL_PATH" output/baseline
./submit output/baseline

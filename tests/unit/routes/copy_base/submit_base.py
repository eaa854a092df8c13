"""Sanity check of the submission path: submit the base model unchanged."""
import os
import shutil
import subprocess

src = os.environ.get("MODEL_PATH", "models/base")
dst = "output/v0"
if os.path.isdir(dst):
    shutil.rmtree(dst)
shutil.copytree(src, dst)
subprocess.run(["./submit", dst], check=True)

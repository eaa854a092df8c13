"""Runs all stages; each in its own process so that GPU memory is freed."""
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def sh(script, *args):
    print("running", script)
    subprocess.check_call([sys.executable, os.path.join(HERE, script), *args])


def main():
    sh("stage_sft.py", "--epochs", "1")
    sh("stage_rl.py", "--steps", "300")
    os.system("./submit output/rl")


if __name__ == "__main__":
    main()

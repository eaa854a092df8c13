
import fire
from rlpkg.trainers import make
class CLI:
    def sft(self): make("sft").train()
    def grpo(self, lr=1e-6): make("grpo", lr=lr).train()
def main(): fire.Fire(CLI)

"""A number from 1 to 9 is to be found."""

from autorl_hpc.rollouts.environment import Step


class Environment:
    def reset(self, goal, seed):
        self.number = goal["number"]
        return "I think of a number from 1 to 9."

    def step(self, action):
        if action == str(self.number):
            return Step("Right!", done=True, reward=1.0)
        return Step("No, another one.")

    def close(self):
        pass


class Dialogue:
    def prompt(self, transcript):
        turns = "".join(f"\n> {turn.action}\n{turn.observation}" for turn in transcript.turns)
        return f"{transcript.first}{turns}\n> "

    def action(self, completion):
        return completion.strip()[:1]


def oracle(goal):
    return [str(goal["number"])]

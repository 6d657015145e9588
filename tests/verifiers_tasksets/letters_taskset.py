"""A taskset of one turn: the reward is the share of a letter in the reply."""

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class Letters(vf.TaskData):
    letter: str


class LettersConfig(vf.TasksetConfig):
    letter: str = "e"
    tasks: int = 12


class LettersTask(vf.Task[Letters]):
    @vf.reward(weight=1.0)
    async def share(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return said.count(self.data.letter) / max(len(said), 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        print("a taskset may print")
        for number in range(self.config.tasks):
            yield LettersTask(
                Letters(
                    prompt=f"problem {number}",
                    system_prompt="Write a word.",
                    letter=self.config.letter,
                ),
                self.config.task,
            )

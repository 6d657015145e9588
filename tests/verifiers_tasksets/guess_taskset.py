"""A taskset with an environment of its own: several turns, in which the rules answer."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class Secret(vf.TaskData):
    secret: int


class GuessTask(vf.Task[Secret]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield GuessTask(
                Secret(prompt=f"Guess, from 0 to 9. (game {number})", secret=number % 10),
                self.config.task,
            )
            number += 1


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or str(task.data.secret) in segment.last_reply:
                    break
                segment = await interaction.turn("No. Guess again.")
        right = str(task.data.secret) in (segment.last_reply or "")
        interaction.trace.record_reward("right", 1.0 if right else 0.25)

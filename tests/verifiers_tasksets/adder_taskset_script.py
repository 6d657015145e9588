"""A taskset with a tool, which runs as a server of its own."""

import verifiers.v1 as vf

__all__ = ["AdderTaskset"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "adder"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AdderTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AdderTask(vf.Task[vf.TaskData, vf.State, AdderTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AdderConfig(vf.TasksetConfig):
    task: AdderTaskConfig = AdderTaskConfig()


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self):
        return [
            AdderTask(vf.TaskData(prompt=f"What is {n} + 2?"), self.config.task) for n in range(12)
        ]


if __name__ == "__main__":
    Adder.run()

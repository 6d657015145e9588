"""Environments for servers of the `openenv` package: python openenv_games_script.py KIND PORT."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: str


class Answer(Observation):
    text: str = ""


class Numbers(Environment):
    """Guess the number that the seed has drawn, from 0 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._secret, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._secret, self._state = (seed or 0) % 10, State(episode_id=episode_id)
        return Answer(text=f"Guess from 0 to 9. Hint: {self._secret}")

    def step(self, action, timeout_s=None, **kwargs):
        if not action.number.isdigit():
            raise ValueError(f"{action.number} is no number")
        guess = int(action.number)
        if guess == self._secret:
            return Answer(text="right", reward=1.0, done=True)
        return Answer(text="higher" if guess < self._secret else "lower", reward=0.0, done=False)

    @property
    def state(self):
        return self._state


class Forgetful(Numbers):
    """Ignores the seed."""

    count = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        Forgetful.count += 1
        return super().reset(Forgetful.count)


def make_tools():
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("numbers")
            self._state = State()

            @server.tool()
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Answer(text=f"What is {(seed or 0) % 10} + 2?")

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Answer(text="unknown")

        @property
        def state(self):
            return self._state

    return Tools


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    built = {"numbers": Numbers, "forgetful": Forgetful}.get(kind) or make_tools()
    action = Guess
    if kind == "tools":
        from openenv.core.env_server.mcp_types import CallToolAction as action
    most = 2 if kind == "forgetful" else 64
    uvicorn.run(
        create_app(built, action, Answer, max_concurrent_envs=most),
        host="127.0.0.1",
        port=port,
        log_level="warning",
    )

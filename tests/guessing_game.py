"""A number-guessing game that registers with Gymnasium on import, as third-party environments
do."""

import string

import gymnasium


class GuessNumber(gymnasium.Env):
    """A hidden number that occasionally moves by one; a guess may be any text."""

    observation_space = action_space = gymnasium.spaces.Text(100, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._hidden = int(self.np_random.integers(1, 1001))
        return f"Guess. It ends with {self._hidden % 100}.", {}

    def step(self, action):
        self._hidden += int(self.np_random.integers(2))
        try:
            guess = int(action[:100])
        except ValueError:
            answer = "no number"
        else:
            answer = "higher" if guess < self._hidden else "lower"
            answer = "right" if guess == self._hidden else answer
        right = answer == "right"
        return f"{answer} {self.np_random.integers(10**6)}", float(right), right, False, {}


gymnasium.register("guessing_game/GuessNumber-v0", entry_point=GuessNumber)

"""An engine as others write them, registered with Gymnasium when it is imported."""

import string

import gymnasium


class Hunt(gymnasium.Env):
    """A number is hidden, and moves by one now and then; any text may be a guess."""

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
            told = "no number"
        else:
            told = "higher" if guess < self._hidden else "lower"
            told = "right" if guess == self._hidden else told
        right = told == "right"
        return f"{told} {self.np_random.integers(10**6)}", float(right), right, False, {}


gymnasium.register("hunting/Hunt-v0", entry_point=Hunt)

"""Numbers that tell whether the agent's reasoning still depends on its input."""

"""Metrics that show whether the agent's reasoning still depends on its input."""

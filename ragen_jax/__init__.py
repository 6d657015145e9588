"""ragen_jax: multi-turn RL for LLM agents that watches whether they think about their input."""

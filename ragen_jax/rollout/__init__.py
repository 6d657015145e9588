"""Rollouts: play problems with a policy, return episodes of tokens.

`play` runs the turns of groups of episodes, `sample` draws tokens on the devices, `chat` turns
observations into prompts and replies into actions, `collect` fills a step with groups.
"""

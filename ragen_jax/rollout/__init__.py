"""Playing: problems and a policy come in, episodes of tokens go out.

`play` runs the turns of groups of episodes, `sample` draws tokens on the devices, `chat` turns
observations into prompts and replies into actions, `collect` fills a step with groups.
"""

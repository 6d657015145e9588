"""Show and play the problems of a config's environments, and check what the environments return.

contract    the members of an environment, checked one by one
plays       problems played to their end by the expert or with random actions
prompts     what the model reads, and how many tokens it takes
describe    the report of a config
"""

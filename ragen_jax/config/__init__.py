"""The settings of a run: their domains, automatic values, checks and the command line.

In: a config file with its overrides. Out: a checked Config and the frozen objects that the rest
of the package receives.
"""

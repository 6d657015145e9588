"""List the programs that a run compiles, describe their shapes and costs, and precompile them.

In: a config and a mesh. Out: named programs, compiled or measured. Used by train and preflight.
"""

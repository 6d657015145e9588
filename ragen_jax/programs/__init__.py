"""The programs that a run compiles: their list, shapes and costs, and compiling them in advance.

In: a config and a mesh. Out: named programs, compiled or measured. Used by train and preflight.
"""

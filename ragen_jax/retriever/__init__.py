"""Search in a corpus as a service: `build` makes an index, `serve` answers queries.

In: a corpus of any size (envs/search_qa/passages.py), optionally with vectors and an encoder. Out:
a folder with the index, and answers over HTTP in two protocols (envs/search_qa/protocols.py).
"""

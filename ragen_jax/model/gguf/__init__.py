"""GGUF files, llama.cpp's format of models, most of them quantised.

In: the path of a .gguf file. Out: a model directory in Hugging Face format in the cache, with the
dequantised weights in float32, which the rest of the program opens like any other directory.
reader.py opens the file, shape.py reads the network's shape, tensors.py names, dequantises and
reorders the tensors, tokenizer.py builds the tokenizer, convert.py writes the directory. The
package `gguf` (extra "gguf") reads the format and dequantises; this folder knows what its keys
mean. Keys and tensor names are llama.cpp's (gguf-py/gguf/constants.py).
"""

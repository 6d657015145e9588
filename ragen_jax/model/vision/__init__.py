"""Vision: the tower, its config and tensors, and images as patches.

In: images of an environment. Out: embeddings in the places of the image tokens.
"""

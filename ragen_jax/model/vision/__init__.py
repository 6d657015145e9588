"""Vision: the tower, its config and tensors, and images as patches.

In: images of an environment. Out: embeddings at the positions of the image tokens.
"""

"""A divergence as a draft of an issue for PyTorch's tracker. Nothing here files anything.

In: a find, judged and ablated. Out: Markdown.
"""

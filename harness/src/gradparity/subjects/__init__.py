"""Who is judged: eager, stock torch in its modes, retrograd, and any torch.compile backend.

In: a subject's name. Out: a Subject.
"""

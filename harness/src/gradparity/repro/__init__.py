"""A divergence as one script in plain torch.

In: a program, a subject, a row. Out: the text of a script that needs torch and nothing else.
"""

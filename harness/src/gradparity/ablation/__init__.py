"""Which stage of a compiler breaks a case, and at which operator.

In: a program that diverges under a subject. Out: an Ablation.
"""

"""How far a backend keeps eager's contract, in levels: a choice of the corpora, run once, counted by level.

In: a backend's name. Out: a `Conformance`: a page, a file, a badge; two of them can be compared.
"""

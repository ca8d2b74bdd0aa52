"""Where results are kept: one SQLite file per campaign, lines of JSON to carry them elsewhere.

In: rows. Out: the same rows, also after the process that wrote them was killed.
"""

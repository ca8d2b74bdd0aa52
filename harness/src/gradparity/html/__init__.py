"""The report as one self-contained HTML page.

In: rows, and the runs of a store. Out: a file that opens offline.
"""

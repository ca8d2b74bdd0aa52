"""The parts of a campaign of generated programs: what a worker does, and what a find is.

In: plain data. Out: plain data.
"""

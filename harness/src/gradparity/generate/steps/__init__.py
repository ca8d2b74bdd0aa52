"""State machines over steps: training in several steps, and what changes between two of them.

In: a draft. Out: a script whose steps share one compiled module, so that caches are kept. `changes.py` is the
table of changes, `training.py` the program around them.
"""

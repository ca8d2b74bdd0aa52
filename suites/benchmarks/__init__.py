"""The asv benchmarks of retrograd's live path: compile time, run time and memory of a backward.

Every figure that is a ratio was measured side by side in one run, in fresh processes that `fresh` starts.
"""

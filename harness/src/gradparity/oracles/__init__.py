"""Oracles: small functions from evidence to a finding, or None.

In: Evidence (eager's outcome, the subject's, a float64 reference on demand). Out: a Finding | None each.
"""

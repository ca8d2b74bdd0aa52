"""Checks: oracles that need runs of their own, asked for by name after a case agrees.

In: a program, a subject, a device. Out: a Finding, or None.
"""

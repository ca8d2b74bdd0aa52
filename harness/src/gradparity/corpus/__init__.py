"""Where programs come from: hand-written scenarios, torch's own databases, small models.

In: a corpus name. Out: chunks (names) and, per chunk, programs.
"""

"""What was compiled, found again in memory: by a key, then by guards. Bounded.

On disk there is only what Inductor keeps. The joint trace cannot be skipped without guards on the Python code
of the function; what is left, torch's minimum cut, takes about 4 % of the time that a second process needs
until its first backward has run (0.9 of 19 to 24 s for a 4-layer transformer; the first process needs 163 s),
and a file of our own would not pay for itself.
"""

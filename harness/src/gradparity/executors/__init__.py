"""Where units of work run: in this process, or in worker processes with a time limit.

In: a function and units of plain data. Out: messages of plain data.
"""

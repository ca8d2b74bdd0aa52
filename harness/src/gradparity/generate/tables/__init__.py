"""Tables of statements: data, one row a line, in the language of `holes.py`.

In: nothing. Out: constants, each a kind of statement. A row is an expression, whose value gets a new name, or
a whole statement behind `!`. Preconditions that a hole cannot say are left to eager: a row that raises there
is drawn again.
"""

"""Specialised code for each kind of call, cached by a key and a guard, up to a limit.

In: the key and inputs of a call, and a function that captures and compiles for them. Out: the code, or the
reason why the call runs in eager mode. ``aot.function`` and the graphs of Dynamo share this mechanism.
"""

"""Code for each kind of call: found again by a key and a guard, made where there is none, bounded.

In: what a call is like, and a function that captures and compiles for it. Out: the code, or the reason for
which the call runs as eager runs it. ``aot.function`` and the graphs of Dynamo share this mechanism.
"""

"""Kinds of statements with a grammar of their own.

In: a scope. Out: whether one was added.
"""

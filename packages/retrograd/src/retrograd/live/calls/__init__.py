"""The typed calls of a `BackwardGraph`: what each one does when it is run. Without user code, and with it."""

"""The typed calls of a `BackwardGraph`: what each one does when it is run. One file per kind of call."""

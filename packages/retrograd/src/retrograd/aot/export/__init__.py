"""Export: a joint graph becomes a program that outlives its process."""

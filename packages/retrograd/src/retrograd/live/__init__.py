"""The live path: capture, schedule, segments, lowering and running of one backward."""

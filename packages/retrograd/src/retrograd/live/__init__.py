"""The live path: captures one backward, schedules, lowers and runs it."""

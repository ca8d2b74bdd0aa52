"""The functions that a `BackwardGraph` calls, without user code (`gradients`) and with it (`user_code`)."""

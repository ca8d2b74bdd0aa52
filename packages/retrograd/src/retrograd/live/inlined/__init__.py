"""Backwards of stock's AOTAutograd, laid into a captured backward node by node."""

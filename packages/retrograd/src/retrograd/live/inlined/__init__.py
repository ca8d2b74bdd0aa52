"""Inlines the backwards of stock's AOTAutograd into a captured backward, node by node."""

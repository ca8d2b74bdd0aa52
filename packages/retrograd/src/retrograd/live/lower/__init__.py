"""Lowering: compiles segments of a captured backward, with guards. Equal segments share their code."""

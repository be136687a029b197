"""Operators without parallel code: gradient-writing linears, norms, rotations, losses, products."""

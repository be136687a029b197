"""Operators without parallel code: slot-writing linears, norms, rotations, losses, products."""

"""Computations whose bits do not depend on where they are executed."""

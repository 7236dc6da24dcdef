"""The scaffold of every system: command line, hyperparameters, options of a run, and its log.

Imports neither jax nor torch, so that a system of any framework can stand on it.
"""

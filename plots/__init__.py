"""Figures: one module per kind, each draws one table of results and computes no statistics."""

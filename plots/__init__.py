"""Figures: one module per kind. Each draws one table of results, which `analysis` computes."""

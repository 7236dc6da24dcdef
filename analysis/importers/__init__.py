"""Readers of run records and of other tools' logs; each returns `analysis.tables.Tables`."""

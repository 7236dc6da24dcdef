"""One module for each algorithm: its loss, and what else is its own."""

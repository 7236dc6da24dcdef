"""Pages of studies: question, findings, limits of the data, and how to reproduce them."""

"""Pages: what was asked, what came out, how far it can be trusted, and how to make it again."""

"""What to run: studies as data, the systems they compare, and the launcher that runs them."""

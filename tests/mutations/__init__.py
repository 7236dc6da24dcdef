"""Do the tests notice? Small changes to the code, made one at a time."""

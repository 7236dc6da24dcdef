"""Systems that the Cleanba trainers are compared with, writing the same run record."""

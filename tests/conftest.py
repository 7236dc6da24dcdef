"""Settings of all tests."""

import os

# On two cores, BLAS threads of several tests that wait for each other cost more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

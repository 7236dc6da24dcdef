"""Saved models: keep one, evaluate one, make a video of it, upload it.

python -m cleanba.evaluate runs/<study>/<run> --episodes 10
"""


def keep_model(setup, params):
    """TODO."""

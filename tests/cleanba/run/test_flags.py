"""Options are translated into the words of a command line."""

import shlex

from cleanba.run.flags import flags


def test_each_kind_of_value_has_its_form():
    options = {
        "env_id": "Pong-v5", "num-steps": 5, "concurrency": True, "progress": False,
        "hiddens": (64, 32), "network": None, "gamma": 0.99, "names": ["a b"],
    }  # fmt: skip
    expected = (
        "--env-id Pong-v5 --num-steps 5 --concurrency --no-progress --hiddens 64 32 --gamma 0.99 "
        "--names 'a b'"
    )
    assert flags(options) == shlex.split(expected)

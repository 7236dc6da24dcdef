"""The adapter to the moolib library, through a fake that behaves as the library was observed to (06e7a3e).

With the library itself, where it is importable, `test_moolib.py` trains through it.
"""

import sys
import types

import numpy as np
import pytest
import torch

from baselines.moolib_atari import moolib_transport


class Fake(types.ModuleType):
    """moolib as observed: it sends arrays but cannot receive them, and remembers the names of lost peers."""

    def __init__(self):
        super().__init__("moolib")
        self.names = set()
        self.sync = 100
        self.timeouts = []
        self.sent = None
        fake = self

        class Rpc:
            def set_name(self, name):
                if name in fake.names:
                    raise AssertionError("the broker never lets a name in again")
                fake.names.add(name)

            def connect(self, address):
                pass

        class Group:
            def __init__(self, rpc, name):
                pass

            def set_timeout(self, seconds):
                fake.timeouts.append(seconds)

            def sync_id(self):
                return fake.sync

            def update(self):
                pass

        class Accumulator:
            def __init__(self, name, parameters, buffers, group):
                self.parameters = list(parameters)

            def update(self):
                pass

            def set_state(self, state):
                fake.sent = state

            def state(self):
                if not isinstance(fake.sent, bytes):
                    raise RuntimeError("Sorry, deserializing arrays is not implemented")
                return fake.sent

            def model_version(self):
                return 7

        self.Rpc, self.Group, self.Accumulator = Rpc, Group, Accumulator


@pytest.fixture
def library(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "moolib", fake)
    return fake


def connect():
    store = torch.distributed.HashStore()
    store.set(moolib_transport.ADDRESS, "127.0.0.1:1")
    return moolib_transport.MoolibAccumulator(store, "peer-0", torch.nn.Linear(2, 1), 1.5)


def test_a_state_arrives_as_it_was_sent(library):
    peer = connect()
    state = {"model/w": np.arange(6.0).reshape(2, 3), "version": np.array(3)}
    peer.set_state(state)
    received = peer.state()
    assert received.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(received[name], value)


def test_a_restarted_peer_has_a_name_of_its_own(library):
    connect()
    connect()
    assert len(library.names) == 2
    assert all(name.startswith("peer-0-") for name in library.names)


def test_a_change_of_the_group_is_another_generation(library):
    """Gradients in transit are lost with it."""
    peer = connect()
    assert peer.generation() == peer.generation() == 100
    library.sync = 101
    assert peer.generation() == 101


def test_the_others_wait_as_long_for_a_lost_peer_as_they_are_told(library):
    connect()
    assert library.timeouts == [1.5]


def test_everything_else_is_the_library_s_own(library):
    assert connect().model_version() == 7
    with pytest.raises(AttributeError):
        connect().no_such_method()

"""Only holders of a run's key can write what its peers read; and the store listens on loopback alone."""

import psutil
import pytest

from baselines.moolib_atari.group import GENERATION, Membership
from baselines.moolib_atari.sealed_store import SealedStore, connect, open_store

KEY = b"key of the run"


@pytest.fixture
def stores():
    """The launcher's store, a peer's, and a stranger's, who has no key but the port."""
    server = open_store()
    return (
        SealedStore(server, KEY),
        SealedStore(connect(server.port), KEY),
        SealedStore(connect(server.port), b"a guess"),
    )


def wait_for(*stores):
    """Wait until the server has what these connections have sent: it answers a question after that."""
    for store in stores:
        store.check(["anything"])


def test_messages_arrive_in_order(stores):
    launcher, peer, _ = stores
    for number in range(3):
        peer.push("log", {"number": number})
    wait_for(peer)
    assert launcher.pop_all("log") == [{"number": n} for n in range(3)]
    peer.set("x", [1, "two"])
    wait_for(peer)
    assert launcher.get("x") == [1, "two"]
    assert launcher.get("nothing") is None


def test_what_a_stranger_writes_is_dropped(stores, capsys):
    launcher, peer, stranger = stores
    stranger.push("log", {"episodes": [{"return": 99_999}]})
    stranger.store.queue_push("log", "not json")
    stranger.store.queue_push("log", "0" * 64 + "[]")
    wait_for(stranger)
    peer.push("log", "mine")
    wait_for(peer)
    assert launcher.pop_all("log") == ["mine"]
    assert launcher.num_refused == 3
    assert capsys.readouterr().err.count("\n") == 1
    stranger.set(GENERATION, [9, ["stranger"], False])
    wait_for(stranger)
    assert peer.get(GENERATION) is None


def test_a_message_counts_once_however_often_it_is_pushed(stores):
    launcher, peer, stranger = stores
    peer.push("log", "an episode")
    wait_for(peer)
    message = stranger.store.queue_pop("log", block=False)
    for _ in range(3):
        stranger.store.queue_push("log", message)
    wait_for(stranger)
    assert launcher.pop_all("log") == ["an episode"]


def test_a_message_is_valid_in_its_own_queue_alone(stores):
    launcher, peer, stranger = stores
    peer.push("joining", ["peer-0", 0])
    wait_for(peer)
    stranger.store.queue_push("log", stranger.store.queue_pop("joining", block=False))
    wait_for(stranger)
    assert launcher.pop_all("log") == []


def test_a_stranger_does_not_become_a_member(stores):
    launcher, peer, stranger = stores
    membership = Membership(launcher)
    stranger.push("joining", ["stranger", 0])
    peer.push("joining", ["peer-0", 0])
    wait_for(stranger, peer)
    assert membership.look() == ["peer-0"]
    membership.publish(begun=False)
    assert peer.get(GENERATION) == [1, ["peer-0"], False]


def test_a_member_that_does_not_come_is_absent_after_a_while(stores, monkeypatch):
    from baselines.moolib_atari import group

    launcher, peer, _ = stores
    membership = Membership(launcher)
    for name in ("peer-0", "peer-1"):
        peer.push("joining", [name, 0])
    wait_for(peer)
    membership.look()
    membership.publish(begun=False)
    assert membership.absent() == []  # it may still be coming
    monkeypatch.setattr(group, "SECONDS_TO_COME", 0.0)
    peer.set("here-1-peer-0", "")
    wait_for(peer)
    assert membership.absent() == ["peer-1"]


def test_the_store_listens_on_loopback_alone(stores):
    port = stores[0].store.port
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("inet")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]

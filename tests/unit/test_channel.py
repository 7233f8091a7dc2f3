import os
import socket

import pytest

from accel_nb.pool.channel import MAX_PACKET, Channel, ChannelError
from accel_nb.pool.messages import Exited, RankMessage, Reply, decode, encode


@pytest.fixture
def pair():
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


@pytest.mark.parametrize("size", [0, 10, MAX_PACKET - 60, MAX_PACKET, 5_000_000])
def test_messages_of_any_size_arrive_whole(pair, size):
    ours, other = pair
    ours.send({"kind": "rank_message", "text": "x" * size})
    assert other.receive() == ({"kind": "rank_message", "text": "x" * size}, [])


def test_descriptors_travel_along(pair):
    ours, other = pair
    descriptor = os.memfd_create("accel_nb_test")
    os.write(descriptor, b"content")
    for size in (1, 500_000):
        ours.send({"kind": "rank_message", "text": "x" * size}, [descriptor])
        _, [received] = other.receive()
        assert os.pread(received, 100, 0) == b"content"
        os.close(received)
    os.close(descriptor)


def test_the_end_is_reported(pair):
    ours, other = pair
    ours.close()
    with pytest.raises(EOFError):
        other.receive()


@pytest.mark.parametrize(
    "packet", [b"i{}", b"i[1]", b"inot json", b"x", b"s", b'i{"kind": 3}', b"i\xff\xfe", b"i" + b"[" * 3000]
)
def test_what_is_no_message_is_refused(packet):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    theirs.send(packet)
    with pytest.raises(ChannelError):
        channel.receive()
    channel.close()
    theirs.close()


def test_records_survive_the_journey():
    for record in (Exited(1, 22, -9), RankMessage(3, "display", {"a": [1]}), Reply(3, "raised", {})):
        assert decode(encode(record)) == record


@pytest.mark.parametrize("message", [{"kind": "nonsense"}, {"kind": "exited"}, {"kind": "kill", "rank": 1, "extra": 2}])
def test_unknown_records_are_refused(message):
    with pytest.raises(ChannelError):
        decode(message)

"""Frames: what goes in comes out, however the bytes are cut; anything else ends the stream."""

import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import EngineDead
from ostinato.runtime.config import EngineConfig, KVConfig
from ostinato.runtime.frames import KINDS, Events, FrameReader, FrameWriter, Start, encode
from ostinato.runtime.http.strict_json import MAX_DEPTH
from ostinato.runtime.messages import (
    Abort,
    CallDone,
    EndRequests,
    EngineInfo,
    EngineState,
    EngineStats,
    Fatal,
    GenerateRequest,
    KVTarget,
    PoolRequest,
    PoolResult,
    PoolResults,
    Refused,
    ResetPrefixCache,
    SamplingParams,
    Sleep,
    StartProfile,
    StopProfile,
    ThoughtBlock,
    Thoughts,
    TokenEvent,
    TokenLogprob,
    Wake,
)

INFO = EngineInfo(
    model="toy",
    vocab_size=9,
    max_model_len=64,
    block_tokens=16,
    eos_token_ids=(1, 2),
    dtype="float32",
    artifact="/models/Bär 🐻",
)
REQUEST = GenerateRequest(
    request_id="a-0",
    prompt_token_ids=tuple(range(300)),
    sampling=SamplingParams(
        logit_bias={5: -100.0},
        stop=("\n\n", "🐻"),
        seed=2**63 - 1,
        logprobs=0,
        thinking_token_budget=7,
        thoughts=Thoughts(
            budget=7, blocks=(ThoughtBlock(start="<｜é｜>", closing=(5, 6), mark=1),), ends=("</é>",), begun=0
        ),
    ),
    cache_salt="é",
)
EVENT = TokenEvent(
    request_id="a-0",
    token_ids=(7, 8),
    logprobs=(TokenLogprob(token_id=7, logprob=-0.5, rank=1, top=((7, -0.5), (3, -1.25))),),
    prompt_logprobs=(None, TokenLogprob(token_id=1, logprob=-2.0, rank=4)),
    finish_reason="stop",
    stop_token_id=8,
    cached_tokens=16,
)
MESSAGES = [
    Start(artifact="/models/x", config=EngineConfig(kv=KVConfig(block_tokens=32))),
    REQUEST,
    Abort(request_ids=("a-0", "b")),
    INFO,
    EngineStats(steps=3, running=1),
    Events(events=(EVENT, TokenEvent(request_id="b", finish_reason="error", error="NaN"))),
    Refused(request_id="c", error="ContextTooLong", message="too long", param="prompt"),
    Fatal(error="gone", kind="ModelError"),
    KVTarget(call_id=1, target_bytes=1 << 40),
    Sleep(call_id=2, level=2),
    Wake(call_id=3),
    CallDone(call_id=2, state=EngineState()),
    ResetPrefixCache(call_id=4),
    EndRequests(call_id=5, request_ids=("a-0",)),
    StartProfile(call_id=6, seconds=0.5),
    StopProfile(call_id=7),
    PoolRequest(request_id="d", token_ids=(1, 2), token_types=(0, 1), normalize=True),
    PoolResults(
        results=(PoolResult(request_id="d", numbers="AACAPw=="), PoolResult(request_id="e", error="NaN"))
    ),
]


def test_each_kind_of_message_is_covered_here():
    assert {type(message) for message in MESSAGES} == set(KINDS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message):
    assert FrameReader().feed(encode(message)) == [message]


@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_messages_survive_any_cutting_of_the_stream(cuts):
    stream = b"".join(encode(message) for message in MESSAGES)
    ends = [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    reader, got, begin = FrameReader(), [], 0
    for end in ends:
        got += reader.feed(stream[begin:end])
        begin = end
    assert got == MESSAGES
    assert reader.pending_bytes == 0


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("!IB", 3, 99) + b"{}",  # no such kind
        struct.pack("!IB", 0, 0),  # shorter than its own kind byte
        struct.pack("!IB", 0xFFFFFFFF, 1),  # longer than any frame
        struct.pack("!IB", 3, 1) + b"{}",  # right kind, missing fields
        struct.pack("!IB", 3, 1) + b"\xff{",  # not JSON
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_bytes_that_are_no_frame_end_the_stream(stream):
    with pytest.raises(EngineDead, match="broken frame"):
        FrameReader().feed(stream)


def test_what_a_body_may_nest_survives_a_frame_with_room_for_what_is_wrapped_around_it():
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 20):
        deep = {"a": deep}
    request = REQUEST.model_copy(update={"sampling": SamplingParams(response_format=deep)})
    assert FrameReader().feed(encode(request)) == [request]


def test_fields_at_their_defaults_cost_nothing():
    assert len(encode(Events(events=(TokenEvent(request_id="a", token_ids=(5,)),)))) < 60


def test_writer_does_not_wait_for_a_slow_reader_and_loses_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        writer = FrameWriter(ours)
        sent = [TokenEvent(request_id=str(i), token_ids=tuple(range(200))) for i in range(200)]
        for event in sent:
            writer.send([Events(events=(event,))])  # would block for ever if it waited: nobody reads
        assert writer.unsent_bytes > 0
        reader, got = FrameReader(), []
        while len(got) < len(sent):
            got += reader.feed(theirs.recv(1 << 16))
            writer.send([])
        assert [message.events[0] for message in got] == sent
        assert writer.unsent_bytes == 0


def test_writer_says_that_the_reader_is_gone():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError, match="Broken pipe"):
        FrameWriter(ours).send([Fatal(error="x")])

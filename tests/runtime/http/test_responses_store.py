"""The store of responses is bounded in bytes and time."""

import sys

from ostinato.runtime.http.responses_store import KEPT_BYTES, ResponseStore, StoredResponse


def made(text: str, *, owner: str = "me", item: str = "m") -> StoredResponse:
    return StoredResponse(owner, text, (), ((item, "x"),), (), background=False)


def test_the_oldest_goes_when_room_is_needed():
    size = made("a" * 100).num_bytes
    assert size == KEPT_BYTES + sys.getsizeof("a" * 100) + sys.getsizeof("x")
    assert made("😀" * 100).num_bytes - size > 300  # what Python keeps of such text is four bytes a character
    store = ResponseStore(2 * size, 60)
    for name in ("one", "two", "three"):
        store.put(name, made(name[0] * 100, item=f"item-{name}"))
    assert store.get("one", "me") is None
    assert store.item("item-one", "me") is None
    assert store.get("three", "me").body == "t" * 100
    assert store.num_bytes == 2 * size


def test_one_that_is_too_large_is_not_kept_and_drives_nothing_out():
    store = ResponseStore(2000, 60)
    store.put("small", made("a"))
    store.put("large", made("b" * 3000))
    assert store.get("large", "me") is None
    assert store.get("small", "me") is not None


def test_time_ends_and_the_bytes_come_back():
    now = [0.0]
    store = ResponseStore(10_000, 60, clock=lambda: now[0])
    store.put("one", made("a"))
    now[0] = 59.0
    store.put("two", made("b", item="n"))
    assert store.get("one", "me") is not None
    now[0] = 60.0
    assert store.get("one", "me") is None
    assert store.item("n", "me") == "x"
    now[0] = 200.0
    assert store.get("two", "me") is None
    assert store.num_bytes == 0


def test_deleting_and_replacing_keep_the_books():
    store = ResponseStore(10_000, 60)
    store.put("one", made("a" * 9))
    store.put("one", made("b"))
    assert store.num_bytes == made("b").num_bytes
    store.delete("one")
    store.delete("one")
    assert store.num_bytes == 0


def test_another_owner_finds_nothing():
    store = ResponseStore(10_000, 60)
    store.put("one", made("a"))
    assert store.get("one", "other") is None
    assert store.item("m", "other") is None


def test_a_store_of_no_bytes_keeps_nothing():
    store = ResponseStore(0, 60)
    store.put("one", made("a"))
    assert store.get("one", "me") is None

"""Tensors over raw addresses: bytes are shared, owners live as long, nothing is read at creation."""

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch

from ostinato.runtime.memory.window_tensor import window_tensor

CPU = torch.device("cpu")


class Owner:
    """Something that can be watched."""


def test_a_tensor_reads_and_writes_the_addresses_themselves():
    memory = ctypes.create_string_buffer(1000)
    window = window_tensor(ctypes.addressof(memory), 1000, CPU, None)
    window[3:7] = 9
    memory[8] = b"\x05"
    assert memory.raw[:10] == bytes([0, 0, 0, 9, 9, 9, 9, 0, 5, 0])
    assert (window.dtype, window.shape, int(window.sum())) == (torch.uint8, (1000,), 41)
    assert window.untyped_storage().nbytes() == 1000
    assert float(window.view(torch.float32).view(50, 5)[0, 1]) != 0


def test_addresses_without_memory_are_fine_until_touched():
    window = window_tensor(1 << 40, 1 << 45, CPU, None)
    tail = window.view(torch.bfloat16).view(1 << 20, -1)[-1]
    assert tail.data_ptr() == (1 << 40) + (1 << 45) - (1 << 25)


def test_the_owner_lives_until_the_last_view_goes_in_whatever_thread():
    memory = ctypes.create_string_buffer(64)
    owner = Owner()
    gone = weakref.ref(owner)
    views = [window_tensor(ctypes.addressof(memory), 64, CPU, owner)[8:]]
    del owner
    gc.collect()
    assert gone() is not None
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert gone() is None


def test_a_tensor_that_is_alive_at_exit_does_no_harm():
    script = """
    import builtins, ctypes, torch
    from ostinato.runtime.memory.window_tensor import window_tensor
    builtins.memory = ctypes.create_string_buffer(64)
    builtins.window = window_tensor(ctypes.addressof(builtins.memory), 64, torch.device("cpu"), object())
    torch.keep = builtins.window[3:]
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device=meta: must be one of cpu, cuda"):
        window_tensor(0, 1, torch.device("meta"), None)

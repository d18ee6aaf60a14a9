"""A real server on the CPU, put to sleep and woken by its admin routes while requests wait."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.http_streams import GREEDY
from tests.support.server_process import eventually, serving

KEY = {"Authorization": "Bearer root"}
ASK = {**GREEDY, "prompt": "the quick brown fox", "max_tokens": 200}


def test_requests_wait_while_it_sleeps_and_are_answered_as_before(tiny_artifact, tmp_path):
    environ = {"OSTINATO_ADMIN_KEY": "root"}
    with (
        serving(tmp_path, tiny_artifact, "--server.stall-s=0.2", env=environ) as server,
        ThreadPoolExecutor(1) as other,
    ):
        assert server.post("/admin/sleep", {"level": 1})[0] == 403
        truth = server.post("/v1/completions", ASK)[1]["choices"]
        for level in (1, 2):
            status, state = server.post("/admin/sleep", {"level": level}, **KEY)
            assert (status, state["asleep"], state["kv_bytes"]) == (200, level, 0)
            asking = other.submit(server.post, "/v1/completions", ASK)
            eventually(lambda: server.metrics()["requests_waiting"] == 1, 10)
            assert server.get("/health")[1]["status"] == "asleep"
            assert server.metrics()["kv_committed_bytes"] == 0
            assert server.post("/admin/wake", {}, **KEY)[1]["asleep"] == 0
            assert asking.result(30)[1]["choices"] == truth
        server.post("/admin/sleep", {"level": 2}, **KEY)
        server.terminate()
        assert server.wait_end() == 0
    assert "Traceback" not in server.log

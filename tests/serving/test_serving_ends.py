"""The server ends gracefully at a signal, and takes only ports that are free."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from realrl.config.errors import UserError
from realrl.serving.endpoint import make_app
from realrl.serving.listening import ApiServer, format_url, is_local, open_socket

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import threading
from realrl.huggingface.tokenizers import train_bpe
from realrl.serving.endpoint import make_app
from realrl.serving.engine import Piece
from realrl.serving.listening import ApiServer, format_url, open_socket
from realrl.serving.prompts import PromptWriter

class Waiting:
    name, context_tokens, vocab_size = "tiny", 100, 300
    def submit(self, prompt, options, receive):
        receive(Piece(tokens=[70], logprobs=[-1.0]))
        def finish():
            sys.stdin.readline()
            receive(Piece(tokens=[71], logprobs=[-1.0], finish="length"))
        threading.Thread(target=finish).start()
        return 1
    def cancel(self, request):
        print("cancelled", flush=True)
    def close(self):
        print("closed", flush=True)

tokenizer = train_bpe(["a"], 300)
writer = PromptWriter(tokenizer, stop_token_ids=[1], memory=None)
listening = open_socket("127.0.0.1", 0)
print(format_url(listening), flush=True)
ApiServer(make_app(Waiting(), tokenizer, writer, token=None)).serve_forever(listening)
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdin is not None and process.stdout is not None
        url = process.stdout.readline().strip()
        asked = {"prompt": "a", "stream": True, "max_tokens": 2, "ignore_eos": True}
        with httpx2.stream("POST", f"{url}/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(number)
            process.stdin.write("go on\n")
            process.stdin.flush()
            events = [first, *filter(None, lines)]
        assert process.stdout.read().split() == ["closed", "ended"]
    assert process.returncode == 0
    assert [json.loads(event[6:])["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "length"]
    assert events[-1] == "data: [DONE]"


def test_a_port_in_use_and_a_wrong_host_are_mistakes_of_the_user() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert is_local(taken) and format_url(taken) == f"http://127.0.0.1:{port}/v1"
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: "):
            open_socket("127.0.0.1", port)
    with pytest.raises(UserError, match="--host"):
        open_socket("no host", 0)


def test_requests_that_do_not_finish_in_time_are_cancelled(engine: Any, tokenizer: Any, writer: Any) -> None:
    engine.endless = True
    listening = open_socket()
    url, server = (
        format_url(listening),
        ApiServer(make_app(engine, tokenizer, writer, token=None), grace_seconds=0),
    )
    thread = threading.Thread(target=server.serve_forever, args=(listening,), daemon=True)
    thread.start()
    asked = {"prompt": "a", "stream": True}
    with httpx2.stream("POST", f"{url}/completions", json=asked, timeout=60) as answer:
        next(answer.iter_raw())
        server.stop()
        thread.join(60)
    assert not thread.is_alive() and engine.cancelled == {1} and engine.closed

"""Engine in this process: a generate call that never ends, whose rows serve requests."""

import threading
from array import array
from collections.abc import Callable, Sequence

import torch

from realrl.engine.generation.decode_batch import DecodeBatch, GenerateCall
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.generation.scheduler import DecodeRow, Prompt
from realrl.engine.model import Model
from realrl.recipe.generation import GenerationConfig
from realrl.serving.engine import Piece, SamplingOptions
from realrl.serving.rows import Requests


class LocalEngine:
    """A model of one process that continues many prompts at a time; see `Engine`.

    Its rows keep the keys and values of finished requests until other requests need the room.
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        stop_token_ids: tuple[int, ...],
        context_tokens: int,
        rows: int,
        kv_tokens: int,
    ) -> None:
        """Allocate the KV cache, and start the thread that generates.

        `rows` is the number of requests that run at a time, `kv_tokens` the number of tokens that the cache holds
        for all of them. It holds at least one request of `context_tokens` tokens.
        """
        self.name, self.context_tokens, self.vocab_size = name, context_tokens, model.shape.vocab_size
        self.context_setting = ""
        self.stop_token_ids = stop_token_ids
        # The first token of a request is a prompt, so that everything else may change from request to request.
        served = [DecodeRow(i, Prompt(i, array("q", [0]))) for i in range(rows)]
        self._requests = Requests(served, stop_token_ids)
        with torch.no_grad():
            self._call = GenerateCall(
                model,
                served,
                sampling=GenerationConfig(max_new_tokens=context_tokens - 1),
                stop_token_ids=stop_token_ids,
                seed=SamplingSeed(0, 0),
                kv_capacity=kv_tokens,
                turns=self._requests,
                serves=True,
            )
        self._thread = threading.Thread(target=self._generate, name="engine", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """See `Engine.problem`."""
        return self._requests.problem

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """Continue a prompt, which leaves room for at least one more token. See `Engine.submit`."""
        assert 0 < len(prompt) < self.context_tokens, "a prompt has tokens, and leaves room for one more"
        return self._requests.submit(prompt, options, receive)

    def cancel(self, request: int) -> None:
        """End a request. Nothing happens if it has ended."""
        self._requests.cancel(request)

    def close(self) -> None:
        """End all requests with an error, and the thread that generates."""
        self._requests.close("the server stops")
        self._thread.join()

    def _generate(self) -> None:
        reason = "the server stops"
        try:
            for _ in DecodeBatch(self._call, 0).run():
                pass
        except BaseException as error:
            reason = f"the engine has failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._requests.close(reason)
            self._requests.fail_all()

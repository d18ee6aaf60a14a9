"""The Python front door: `LLM(path).generate("...")`.

The engine runs on a thread of its own and an asyncio loop on a second one, so calls may come from any
thread, also from one that runs a loop already (a notebook).
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from ostinato import log as logs
from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.client import EngineClient
from ostinato.runtime.config import EngineConfig, read_settings
from ostinato.runtime.llm_arguments import (
    Message,
    check_queueing,
    check_template,
    check_truncation,
    read_conversation,
    read_conversations,
    read_documents,
    read_prompt,
    read_prompts,
    read_template_kwargs,
)
from ostinato.runtime.llm_session import Job, Session
from ostinato.runtime.load_ahead import load_ahead
from ostinato.runtime.messages import EngineInfo, EngineState, EngineStats, SamplingParams
from ostinato.runtime.openmp_spin import shorten_spin
from ostinato.runtime.request_output import (
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from ostinato.runtime.text import TextFrontEnd

Prompt = str | Sequence[int]


class LLM:
    """A model in this process.

        with LLM("SmolLM2-135M-Instruct", kv={"max_gib": 2}) as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

    `path` is an artifact, or a model folder or GGUF file, which is compiled into the cache first.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        config: EngineConfig | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are sections or fields of `EngineConfig`; they win over `config`.

        `progress`: show a bar while compiling; None: when stderr is a terminal.
        Raises ConfigError, ArtifactError, ModelError, CompileError.
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"path: got {path!r:.60} ({type(path).__name__}); give a str or a Path")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config: got {config!r:.60} ({type(config).__name__}); give an EngineConfig, or settings as "
                'keywords, as in LLM(path, kv={"max_gib": 2})'
            )
        config = configured(config or EngineConfig(), settings)
        logs.setup(config.log_level)
        if "torch" not in sys.modules:
            shorten_spin(os.environ)
        with load_ahead(Path(path).expanduser()) as digest:
            # Imported here: a wrong setting is reported without waiting for torch, and after the lines above.
            with _collector_paused():
                from ostinato.runtime.artifact import load_artifact
                from ostinato.runtime.compile_cache import resolve_artifact
                from ostinato.runtime.engine_thread import EngineThread
                from ostinato.runtime.progress import compile_progress

            with compile_progress(Path(path).name, show=progress) as report:
                folder = resolve_artifact(path, config, progress=report)
            engine = EngineThread(folder, config, load=partial(load_artifact, digest=digest))
            self._open(engine, partial(TextFrontEnd.load, folder / "tokenizer"), config)

    @classmethod
    def over(cls, client: EngineClient, text: TextFrontEnd, config: EngineConfig) -> Self:
        """An LLM over an engine of your own, not started yet; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._open(client, lambda: text, config)
        return llm

    def _open(
        self, client: EngineClient, load_text: Callable[[], TextFrontEnd], config: EngineConfig
    ) -> None:
        self.config = config
        self._session = Session(client, config)
        # The session does not know this object, so it is also closed when the object is dropped, and at exit.
        self._finalizer = weakref.finalize(self, self._session.close)
        try:
            self._session.open(load_text)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        self._session.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its memory and threads. Safe to call twice."""
        self._finalizer()

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        return self._session.client.info

    @property
    def stats(self) -> EngineStats:
        """The engine's newest snapshot: running requests, KV blocks, prefix hits."""
        return self._session.client.stats

    @property
    def text(self) -> TextFrontEnd:
        """Tokenizer and chat template."""
        return self._session.text

    def sleep(self, level: int = 1) -> EngineState:
        """Give the memory of weights and KV back until `wake`, and say what is held then.

        Level 1 keeps the weights in host memory, level 2 reads them from the artifact again. Requests wait
        meanwhile; the prefix cache is emptied. Raises InvalidRequest, SleepRefused, EngineDead.
        """
        return self._session.run(self._session.client.sleep(level))

    def wake(self) -> EngineState:
        """Have the memory again, the weights verified. Raises WakeFailed (it sleeps on), EngineDead."""
        return self._session.run(self._session.client.wake())

    def set_kv_target(self, target_bytes: int | None) -> EngineState:
        """Have at most so many bytes of KV memory, from now on; None: what the settings allow.

        Blocks in use stay until their requests end, so the state returned may show more.
        Raises InvalidRequest, EngineDead.
        """
        return self._session.run(self._session.client.set_kv_target(target_bytes))

    def reset_prefix_cache(self) -> int:
        """Let no later call find what was computed so far; returns how many blocks could be found."""
        return self._session.run(self._session.client.reset_prefix_cache())

    def abort(self) -> int:
        """End all answers under way, which then have finish_reason `abort`; for another thread than theirs.

        Returns how many were ended, when their KV blocks are back. What `generate` and `chat` have not sent
        to the engine yet is answered.
        """
        return self._session.run(self._session.client.end_requests(None))

    def start_profile(self, seconds: float | None = None) -> float:
        """Record what the engine does; returns the seconds after which the profile ends by itself.

        None: `profile.max_seconds`. Needs `profile.folder`.
        Raises InvalidRequest, ProfileRefused, EngineDead.
        """
        return self._session.run(self._session.client.start_profile(seconds))

    def stop_profile(self) -> Path:
        """End the profile and return its Chrome trace. Raises ProfileRefused, EngineDead."""
        return Path(self._session.run(self._session.client.stop_profile()))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts (text, token ids or an array of them) together; one output each, in order.

        `sampling`: one for all or one per prompt; None: the model's own defaults. With `n` > 1 and a seed,
        answer i uses seed + i. `truncate_prompt_tokens`: use the last so many tokens of each prompt, -1: as
        many as leave room for max_tokens. `priority`: lower runs first. `cache_salt`: prefixes are shared
        only among equal ones. `progress`: a bar on stderr; None: when that is a terminal.
        A request that fails alone ends with finish_reason `error`. Raises InvalidRequest or ContextTooLong
        before anything runs; EngineDead.
        """
        session = self._session
        session.check_generates()
        check_truncation(truncate_prompt_tokens)
        given = read_prompts(prompts)
        several = session.sampling(sampling, len(given))
        kept = session.kept(truncate_prompt_tokens, several)
        inputs = [session.encode(one, most) for one, most in zip(given, kept, strict=True)]
        return self._answer(
            session.jobs(inputs, several, n, priority=priority, cache_salt=cache_salt), progress
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role": ..., "content": ...}`) or several; see `generate`.

        `add_generation_prompt`: None means yes, unless `continue_final_message`: then the answer goes on
        where the last message ends. `chat_template` takes the place of the model's: run only programs that
        you trust.
        """
        session = self._session
        session.check_generates()
        check_truncation(truncate_prompt_tokens)
        check_template(chat_template)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message: contradicts add_generation_prompt=True; give one of them",
                param="continue_final_message",
            )
        given = read_conversations(messages)
        several = session.sampling(sampling, len(given))
        inputs = [
            session.render(
                one,
                kept=most,
                add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=read_template_kwargs(template_kwargs),
                documents=read_documents(documents),
            )
            for one, most in zip(given, session.kept(truncate_prompt_tokens, several), strict=True)
        ]
        return self._answer(
            session.jobs(inputs, several, n, priority=priority, cache_salt=cache_salt), progress
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of all prompts (text, token ids or an array of them), in order.

        `dimensions`: the first so many numbers; None: all. `normalize`: to length 1; None: as the model does.
        `truncate_prompt_tokens`: use the first so many tokens of each prompt, -1: as many as the model takes.
        Raises WrongTask for a model that does not embed, InvalidRequest or ContextTooLong before anything
        runs, EngineDead.
        """
        from ostinato.runtime.pooling import llm_pooling

        self._session.check_open()
        check_truncation(truncate_prompt_tokens)
        check_queueing(priority, "")
        options = llm_pooling.Options(
            truncate_prompt_tokens, dimensions, normalize, priority=priority, progress=progress
        )
        return llm_pooling.embed(self._session, prompts, options)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document fits its query: one query for all documents, or as many as there are.

        By a cross-encoder, or by the angle between the vectors of a model that embeds. `use_activation`: let
        a cross-encoder's scores end in a sigmoid; None: as the model does. Truncation and errors as in
        `embed`; of a pair the longer text is cut.
        """
        from ostinato.runtime.pooling import llm_pooling

        self._session.check_open()
        check_truncation(truncate_prompt_tokens)
        check_queueing(priority, "")
        options = llm_pooling.Options(
            truncate_prompt_tokens, sigmoid=use_activation, priority=priority, progress=progress
        )
        return llm_pooling.score(self._session, queries, documents, options)

    async def stream(
        self, prompt: Prompt | Sequence[Message], sampling: SamplingParams | None = None
    ) -> AsyncGenerator[CompletionOutput]:
        """Pieces of one answer as they come, on the caller's loop; the last has a `finish_reason`.

        `prompt` is text, token ids, or the messages of a conversation. Leaving the loop early and closing the
        generator (`contextlib.aclosing`) aborts the request.
        """
        session = self._session
        session.check_generates()
        is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        given = (
            session.render(read_conversation(prompt, "prompt"))
            if is_chat
            else session.encode(read_prompt(prompt, "prompt"))
        )
        (job,) = session.jobs([given], session.sampling(sampling, 1), 1)
        async for piece in session.pieces(job.requests[0]):
            yield piece

    def _answer(self, jobs: list[Job], progress: bool | None) -> list[RequestOutput]:
        from ostinato.runtime.progress import generate_progress

        with generate_progress(sum(len(job.requests) for job in jobs), show=progress) as advance:
            return self._session.run(self._session.answer_all(jobs, advance))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For imports: their million objects stay, and looking for garbage among them takes 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # everything is in the oldest generation now, which is looked at last
        if was_on:
            gc.enable()


def configured(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """`config` with some fields or parts of sections replaced. Raises ConfigError that names the setting."""
    tree = config.model_dump()
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            tree[name] |= value
        else:
            tree[name] = value
    return read_settings(tree, hint="see EngineConfig")

"""Text in, token ids out: tokenizer, chat template and default sampling values of one artifact.

Everything comes from the artifact's `tokenizer/` folder: tokenizer.json, tokenizer_config.json,
special_tokens_map.json, chat_template.jinja, generation_config.json (only the first is required).  Neither
torch nor a transformers model or tokenizer class is imported; the template is rendered by transformers' own
sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from ostinato.errors import ArtifactError, ConfigError, InvalidRequest
from ostinato.runtime.chat_template import Conversation, prepare, render_conversation
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.pooling.pool_check import check_length
from ostinato.runtime.pooling.pool_text import Encoded, encode_input
from ostinato.runtime.prompt_room import room_left
from ostinato.runtime.template_guard import within
from ostinato.runtime.token_bound import TokenBound

T = TypeVar("T")

SHORT = 1024  # characters; encoded in less time than another thread takes to wake up (20 us; 50 to 200 us)
LONG = 1 << 16  # characters; a text up to here is tokenised in some 20 ms and gets the exact number
_THREADS = 2  # the Rust tokenizer works without the GIL; more threads would only take cores from the engine
# The template's own arguments; a request may not replace them through chat_template_kwargs.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversations"}
    | {"continue_final_message", "return_assistant_tokens_mask"}
    | {"self", "template"}  # arguments of the functions that a template's variables go through
)


class SamplingDefaults(BaseModel):
    """What a request gets that does not say otherwise: keys of generation_config.json, as vLLM reads it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)


class TextFrontEnd:
    """Tokenizer and chat template of one model. Its methods may be called from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        defaults: SamplingDefaults | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """`special_tokens`: by transformers' names (`bos_token`); `add_bos`: add_bos_token's value."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.codec = TokenCodec(tokenizer)
        self.chat_template = chat_template
        self.defaults = defaults or SamplingDefaults()
        self.special_tokens = special_tokens or {}
        self.template_timeout_s = 5.0
        self._tokenizer = tokenizer
        self._bound = TokenBound(tokenizer)
        self._bos = self.special_tokens.get("bos_token")
        self._bos_id = None if self._bos is None else tokenizer.token_to_id(self._bos)
        self._add_bos = add_bos
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path) -> TextFrontEnd:
        """Read an artifact's `tokenizer/` folder; ArtifactError says which file is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError(
                f"{path}: no such file; compile the model again from a folder with a tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{path}: not a readable tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = {
            **_special_tokens(_read_json(folder / "special_tokens_map.json")),
            **_special_tokens(config),
        }
        generation = folder / "generation_config.json"
        try:
            defaults = SamplingDefaults.model_validate(_read_json(generation))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ArtifactError(f"{generation}: {first['loc'][0]}: {first['msg']}") from None
        add_bos = config.get("add_bos_token")
        front = cls(
            tokenizer,
            chat_template=_chat_template(folder, config),
            special_tokens=special,
            defaults=defaults,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )
        if front.chat_template is not None:
            front.check_template()
        return front

    def close(self) -> None:
        """Stop the threads. What they are doing is finished first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def off_loop(self, work: Callable[[], T], *, is_short: bool = False) -> T:
        """Run `work` on a tokenizer thread, so that a long prompt delays nobody else.

        `is_short`: it is about at most `SHORT` characters, which is sooner done than handed over.
        """
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def token_id(self, token: str) -> int | None:
        """The id of the one token that `token` is."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode_within(
        self, window: int, text: str, *, param: str, add_special_tokens: bool = True
    ) -> list[int]:
        """`encode` for a context window: ContextTooLong, for a huge text before it is tokenised."""
        self._bound.check(text, window, param=param)
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        room_left(len(ids), window, param=param)
        return ids

    def encode_input(
        self,
        first: str,
        second: str | None,
        *,
        window: int,
        kept: int | None,
        param: str,
        add_special_tokens: bool = True,
    ) -> Encoded:
        """One text or a pair of texts as a model to embed or score with gets them.

        `kept`: cut to so many tokens, special ones counted, of a pair the longer text first, as transformers
        does it; None: whole. InvalidRequest for a text of nothing; ContextTooLong for more than `window`
        tokens, where nothing is cut before a huge text is tokenised.
        """
        if not first or second == "":
            raise InvalidRequest(f"{param}: must not be empty", param=param)
        longest = max(first, second or "", key=len)
        if kept is None and len(longest) > LONG:
            check_length(self._bound.at_least(longest), window, param=param, at_least=True)
        made = encode_input(self._tokenizer, first, second, kept=kept, add_special_tokens=add_special_tokens)
        check_length(len(made.token_ids), window, param=param)
        if not made.token_ids:
            raise InvalidRequest(f"{param}: the text has no tokens", param=param)
        return made

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. BOS is never doubled when the text already begins with it."""
        # The batch call is the one that computes no character offsets: 1.5 times as fast (measured, 2 MB
        # text).
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        bos = self._bos_id
        if not add_special_tokens or bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            return ids[1:]
        if self._add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence."""
        return self.codec.decode(token_ids, skip_special=skip_special)

    def render_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. InvalidRequest carries what the template objects to.

        `continue_final_message`: the text ends where the last message ends, for an answer that goes on there.
        `chat_template`: in place of the model's; it must be as trusted as a program.
        """
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt to /v1/completions", param="messages"
            )
        variables = self.template_variables(template_kwargs)

        def render() -> str:
            return render_conversation(
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=variables,
            )

        prepare()
        try:
            return within(self.template_timeout_s, render)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: any exception of it is about these messages
            raise template_refusal(error) from error

    def template_variables(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """What a template sees besides its arguments: special tokens, and `kwargs` of the request."""
        kwargs = kwargs or {}
        if clash := sorted(_RESERVED & kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {clash[0]} is set by the server", param="chat_template_kwargs"
            )
        return {**self.special_tokens, **kwargs}

    def encode_chat(
        self,
        messages: Conversation,
        *,
        add_special_tokens: bool = False,
        window: int | None = None,
        **template: Any,  # Any: arguments of `render_chat`
    ) -> list[int]:
        """Token ids of a conversation; with `window` as in `encode_within`.

        The template writes BOS itself, so by default no special token is added.
        """
        text = self.render_chat(messages, **template)
        if window is None:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return self.encode_within(window, text, param="messages", add_special_tokens=add_special_tokens)

    def use_template(self, path: str) -> None:
        """Take the chat template in the file `path`, the setting server.chat_template.

        ConfigError when it cannot be read or is no valid Jinja.
        """
        try:
            self.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
            self.check_template()
        except (OSError, UnicodeDecodeError, ArtifactError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(
                f"server.chat_template={path}: {said}; give a file with a Jinja template"
            ) from None

    def check_template(self) -> None:
        """Compile the chat template now: ArtifactError when it is no valid Jinja."""
        try:
            self.render_chat([{"role": "user", "content": "x"}])
        except InvalidRequest as refusal:  # it compiled; it may refuse this message as it may any other
            if isinstance(error := refusal.__cause__, TemplateSyntaxError):
                raise ArtifactError(f"chat template, line {error.lineno}: {error.message}") from None


def template_refusal(error: Exception | str) -> InvalidRequest:
    """What a chat template objects to, as the refusal of a request."""
    said = str(error) or type(error).__name__
    return InvalidRequest(f"messages: the chat template refuses them: {said}", param="messages")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: must hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; an entry is a string or an added-token object."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or its older place in tokenizer_config.json: a string or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None

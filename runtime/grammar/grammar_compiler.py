"""Grammars compiled by llguidance for one tokenizer. Bounded: in size, in work, in what is kept.

llguidance refuses a schema that it cannot enforce, computes masks in tens of microseconds and needs neither
torch nor a compile for each vocabulary (docs/log.md has the comparison).  Its own limits count work ("fuel"),
not time, so a grammar that is too much fails in the same way on every machine: below 0.1 s to compile and
20 ms for a mask.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tokenizers import Tokenizer

from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.grammar.grammar_spec import GrammarSpec
from ostinato.runtime.grammar.lark_text import WHITE_SPACE, schemas_in
from ostinato.runtime.grammar.schema_fault import schema_fault
from ostinato.runtime.grammar.structural_tags import structural_tag_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions  # a type that exists for checkers only

MAX_KEPT = 128  # compiled grammars
MAX_KEPT_BYTES = 4 << 20  # of their texts; what is compiled takes about ten times that
_OF_SCHEMA = "failed to compile JSON schema: "
_NO_SCHEMA = ("Invalid type", "type must be", "schema must be")  # what llguidance says without a place
_EXCERPT = re.compile(r"\n +\d+ \| ")
_MOST_SHOWN = 400  # characters of llguidance's message


class BadGrammar(ValueError):
    """Why a grammar cannot be used, in words for its author."""


class GrammarCompiler:
    """Compiles and keeps grammars. Its methods may be called from any thread."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Nothing is read before the first grammar."""
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._text_tokenizer: Tokenizer | None = None
        self._codec: TokenCodec | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._kept_bytes = 0

    @property
    def mask_words(self) -> int:
        """Length of the masks that matchers write, int32; known once a grammar is compiled."""
        assert self._tokenizer is not None, "no grammar was compiled"
        return -(-self._tokenizer.vocab_size // 32)

    @property
    def end_token(self) -> int:
        """The one token that matchers take for the end; known once a grammar is compiled."""
        assert self._tokenizer is not None, "no grammar was compiled"
        return self._tokenizer.eos_token

    def token_bytes(self, token_id: int) -> bytes:
        """A token's share of the text; known once a grammar is compiled."""
        if self._codec is None:
            assert self._text_tokenizer is not None, "no grammar was compiled"
            self._codec = TokenCodec(self._text_tokenizer)
        return self._codec.token_bytes(token_id)

    @property
    def num_kept(self) -> int:
        """Compiled grammars that wait for the next request with the same one."""
        return len(self._kept)

    def find(self, spec: GrammarSpec) -> LLMatcher | None:
        """A matcher of one's own at the grammar's beginning, if it was compiled before."""
        with self._lock:
            known = self._kept.get(spec)
            if known is None:
                return None
            self._kept.move_to_end(spec)
            return known.deep_copy()

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher at the grammar's beginning. Raises BadGrammar."""
        found = self.find(spec)
        if found is not None:
            return found
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise BadGrammar(
                "this installation has no structured output; pip install 'ostinato[structured]'"
            ) from None
        tokenizer = self._read_tokenizer()
        limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,  # about 20 ms
            step_lexer_fuel=200_000,  # about 15 ms a mask
            step_max_items=50_000,  # about 3 ms a mask
            max_lexer_states=20_000,  # 1 to 2 KB each
            max_grammar_size=500_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(tokenizer, self._source(spec), log_level=0, limits=limits)
        if matcher.is_error():
            _refuse(spec, matcher.get_error())
        made: LLMatcher = matcher.deep_copy()
        self._keep(spec, matcher)
        return made

    def _source(self, spec: GrammarSpec) -> str:
        from llguidance import LLMatcher

        if spec.kind == "json_schema":
            options: JsonCompileOptions = {
                "whitespace_flexible": True,
                "whitespace_pattern": WHITE_SPACE,
                "lenient": spec.lenient,
            }
            schema = spec.text if spec.text.startswith("{") else f'{{"allOf":[{spec.text}]}}'
            try:
                return LLMatcher.grammar_from_json_schema(schema, overrides=options)
            except ValueError as error:  # nested too deeply, for one
                _refuse(spec, str(error))
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "tags":
            assert self._text_tokenizer is not None, "read before"
            wanted, token_id = json.loads(spec.text), self._text_tokenizer.token_to_id
            return LLMatcher.grammar_from_lark(structural_tag_grammar(wanted, "tags", token_id))
        text = spec.text
        if "::=" in text:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # the library raises bare Exception
                _refuse(spec, str(error))
        return LLMatcher.grammar_from_lark(text)

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                if not self._path.is_file():
                    raise BadGrammar("this model has no tokenizer, so no grammar")
                self._text_tokenizer = Tokenizer.from_file(str(self._path))
                self._text_tokenizer.no_truncation()
                self._text_tokenizer.no_padding()
                size = max(self._vocab_size, self._text_tokenizer.get_vocab_size())
                eos = self._eos_token_ids[0] if self._eos_token_ids else None
                self._tokenizer = LLTokenizer(self._text_tokenizer.to_str(), n_vocab=size, eos_token=eos)
            return self._tokenizer

    def _keep(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        with self._lock:
            if spec not in self._kept:
                self._kept_bytes += len(spec.text)
            self._kept[spec] = matcher
            while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                dropped, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(dropped.text)


def _refuse(spec: GrammarSpec, why: str) -> NoReturn:
    hint = ""
    if "x-guidance" in spec.text and _OF_SCHEMA in why:  # Lark of ours: its lines tell a client nothing
        why = why.partition(_OF_SCHEMA)[2].partition("\n")[0]
    if spec.kind != "regex" and why.startswith(_NO_SCHEMA):
        given = [json.loads(spec.text)] if spec.kind == "json_schema" else schemas_in(spec.text)
        why = next((fault for one in given if (fault := schema_fault(one))), why)
    if "invalid regex" in why:  # it is quoted; the lines around it may be ours
        why = _EXCERPT.split(why, 1)[0]
    if spec.kind != "regex" and why.startswith("Unimplemented keys"):
        hint = '; take them out, or give "strict": false to have them ignored'
    why = " ".join(why.split())[:_MOST_SHOWN]
    raise BadGrammar(why + hint) from None

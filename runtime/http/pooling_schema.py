"""The requests of /v1/embeddings, /v1/score and /v1/rerank. Each field says its own rule (docs/api.md)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.graph.facts import Task
from ostinato.runtime.http.prompt_schema import BY_KIND, IdList, Ids, Kept, Text
from ostinato.runtime.http.wire import STRICT, Whole, Wire, optional, required

MAX_INPUTS = 2048  # OpenAI's limit

_IGNORED = frozenset({"user"})
_UNSUPPORTED: dict[str, tuple[object, ...]] = {  # of vLLM, Jina and Cohere, with what is done here anyway
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (),
    "mm_processor_kwargs": ({},),
    "truncation_side": ("right",),
}


Input = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("#texts")]
    | Ids
    | Annotated[list[IdList], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("#id_lists")],
    BY_KIND,
]


def _text_kind(value: object) -> str:
    return "#texts" if isinstance(value, list) else "#text"


Texts = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("#texts")],
    Discriminator(_text_kind),
]


class PoolingRequest(Wire):
    """What the three routes have in common."""

    ignored: ClassVar[frozenset[str]] = _IGNORED
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = _UNSUPPORTED

    truncate_prompt_tokens: Kept | None = optional(
        "of a longer input the first so many tokens are used, special tokens counted and kept; of a pair the "
        "longer text is cut. At most the model's window, which is also what -1 means",
        "none: a longer input is a 400",
    )
    priority: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = optional("lower runs first", "0")
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = (
        optional("of the client's own: printable ASCII, no spaces; a part of the answer's id", "drawn")
    )


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    task: ClassVar[Task | None] = "embed"

    input: Input = required(
        f"a string, a list of strings, of token ids, or of lists of token ids; at most {MAX_INPUTS} inputs. "
        "Empty inputs and ids outside the vocabulary are refused. Token ids are used as they are"
    )
    encoding_format: Literal["float", "base64"] | None = optional(
        "base64: little-endian float32, a third of the size", "float"
    )
    dimensions: Annotated[Whole, Field(ge=1)] | None = optional(
        "the first so many numbers of each vector, scaled to length 1 again if the model does that. Means "
        "something for models trained so (Matryoshka); if the config lists lengths, one of those",
        "all",
    )
    normalize: bool | None = optional("scale vectors to length 1", "as the model does")
    add_special_tokens: bool | None = optional("of a text: [CLS], [SEP], EOS and their like", "true")


class ScoreRequest(PoolingRequest):
    """POST /v1/score."""

    task: ClassVar[Task | None] = "score"

    text_1: Texts = required(f"a string, or 1 to {MAX_INPUTS} of them; one is paired with each of `text_2`")
    text_2: Texts = required("as many as `text_1`, or any number for one `text_1`")
    use_activation: bool | None = optional(
        "of a cross-encoder: let scores end in a sigmoid", "as the model does"
    )

    @model_validator(mode="after")
    def _texts_pair(self) -> ScoreRequest:
        first, second = as_list(self.text_1), as_list(self.text_2)
        if len(first) not in (1, len(second)):
            raise PydanticCustomError(
                "no_pairs", f"has {len(second)} texts and text_1 {len(first)}; give as many, or one text_1",
                {"at": "text_2"},
            )  # fmt: skip
        return self


class DocumentObject(Wire):
    """A document as an object."""

    model_config = STRICT
    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {}

    text: str = required("the document")


def _document_kind(value: object) -> str:
    return "#object" if isinstance(value, dict) else "#string"


Document = Annotated[
    Annotated[str, Tag("#string")] | Annotated[DocumentObject, Tag("#object")], Discriminator(_document_kind)
]


class RerankRequest(PoolingRequest):
    """POST /v1/rerank."""

    task: ClassVar[Task | None] = "score"

    query: str = required("what the documents are compared with")
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] = (
        required(f'1 to {MAX_INPUTS} strings, or objects `{{"text": ...}}`')
    )
    top_n: Annotated[Whole, Field(ge=0)] | None = optional("the best so many; 0: all", "all")
    return_documents: bool | None = optional("the text of each document in the answer", "true")
    use_activation: bool | None = optional(
        "of a cross-encoder: let scores end in a sigmoid", "as the model does"
    )


def as_list(texts: str | list[str]) -> list[str]:
    """One text or several as a list."""
    return [texts] if isinstance(texts, str) else texts

"""Fields of a request that say what the answer must look like, and what the engine is told of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.known_fields import keep_known
from ostinato.runtime.http.strict_json import parse
from ostinato.runtime.http.wire import STRICT, Wire, optional

MAX_CHOICE_TEXTS = 1024


def _schema_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#text"
    return "#flag" if isinstance(value, bool) else "#object" if isinstance(value, dict) else None


Schema = Annotated[
    Annotated[dict[str, Any], Tag("#object")] | Annotated[bool, Tag("#flag")],  # Any: a JSON schema
    Discriminator(
        _schema_kind,
        custom_error_type="schema_kind",
        custom_error_message="must be a JSON schema: an object, true or false",
    ),
]
SchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("#object")] | Annotated[bool, Tag("#flag")] | Annotated[str, Tag("#text")],
    Discriminator(
        _schema_kind,
        custom_error_type="schema_kind",
        custom_error_message="must be a JSON schema: an object, its text, true or false",
    ),
]
ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
]


class TextFormat(BaseModel):
    """Anything."""

    model_config = STRICT

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Some JSON object."""

    model_config = STRICT

    type: Literal["json_object"]


class JsonSchemaSpec(BaseModel):
    """A schema and how seriously it is meant."""

    model_config = STRICT

    name: str | None = None
    description: str | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(BaseModel):
    """JSON that a schema allows."""

    model_config = STRICT

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class TagSpec(BaseModel):
    """One tag."""

    model_config = STRICT

    begin: str
    json_schema: Schema | None = Field(None, alias="schema")
    end: str = ""


class StructuralTagFormat(BaseModel):
    """Free text with tags in it."""

    model_config = STRICT

    type: Literal["structural_tag"]
    structures: Annotated[list[TagSpec], Field(min_length=1, max_length=256, fail_fast=True)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=256)]


class TagFormat(BaseModel):
    """The same as a tree of formats; `runtime/grammar/tag_formats.py` reads it."""

    model_config = STRICT

    type: Literal["structural_tag"]
    format: dict[str, Any]  # Any: formats in each other


_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def _format_kind(value: object) -> str | None:
    if not isinstance(value, dict) or (kind := value.get("type")) not in _FORMATS:
        return None
    return "#tag_format" if kind == "structural_tag" and "format" in value else f"#{kind}"


def _tag_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#text"
    kind = _format_kind(value)
    return kind if kind in ("#structural_tag", "#tag_format") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("#text")]
    | Annotated[JsonObjectFormat, Tag("#json_object")]
    | Annotated[JsonSchemaFormat, Tag("#json_schema")]
    | Annotated[StructuralTagFormat, Tag("#structural_tag")]
    | Annotated[TagFormat, Tag("#tag_format")],
    Discriminator(
        _format_kind,
        custom_error_type="format_kind",
        custom_error_message="must be an object of type text, json_object, json_schema or structural_tag",
    ),
]


StructuralTag = Annotated[
    Annotated[StructuralTagFormat, Tag("#structural_tag")]
    | Annotated[TagFormat, Tag("#tag_format")]
    | Annotated[str, Tag("#text")],
    Discriminator(
        _tag_kind,
        custom_error_type="tag_kind",
        custom_error_message="must be an object of type structural_tag, or its text",
    ),
]

# Of vLLM's fields those that choose how white space and fallbacks are; nothing falls back here.
_NOT_OURS: dict[str, tuple[object, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "whitespace_pattern": (),
}


class StructuredOutputs(BaseModel):
    """`structured_outputs`, vLLM's name for one of these."""

    model_config = STRICT

    json_schema: SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: StructuralTag | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, fields: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return keep_known(fields, known=known, ignored=(), unsupported=_NOT_OURS)


class GrammarRequest(Wire):
    """One of these may be given."""

    response_format: ResponseFormat | None = optional(
        "`text`, `json_object`, `json_schema` or `structural_tag`: see *Structured output*",
        '{"type": "text"}',
    )
    structured_outputs: StructuredOutputs | None = optional(
        "one of `json`, `regex`, `choice`, `grammar`, `json_object`: true, `structural_tag`"
    )
    guided_json: SchemaOrText | None = optional(
        "a JSON schema, also as text; every keyword must be enforceable"
    )
    guided_regex: str | None = optional("the whole answer matches this regular expression")
    guided_choice: ChoiceTexts | None = optional(f"the answer is one of these, up to {MAX_CHOICE_TEXTS}")
    guided_grammar: str | None = optional("the answer follows this grammar, Lark or GBNF")


def grammar_params(fields: GrammarRequest) -> dict[str, Any]:
    """What `SamplingParams` is given. InvalidRequest that names the second of two fields, or a schema."""
    given: list[tuple[str, dict[str, Any]]] = []
    wanted = fields.response_format
    if wanted is not None and not isinstance(wanted, TextFormat):
        dumped = wanted.model_dump(by_alias=True, exclude_none=True)
        given.append(("response_format", {"response_format": dumped}))
    outputs = fields.structured_outputs
    if outputs is not None:
        given += [(f"structured_outputs.{name}", made) for name, made in _structured(outputs)]
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{name}")
        if value is not None:
            given.append((f"guided_{name}", _made(name, value, f"guided_{name}")))
    if not given:
        return {}
    if len(given) > 1:
        (first, _), (second, _) = given[:2]
        raise InvalidRequest(f"{second}: contradicts {first}; give one of the two", param=second)
    (param, values) = given[0]
    return values if param in values else {**values, "grammar_param": param}


def _structured(outputs: StructuredOutputs) -> list[tuple[str, dict[str, Any]]]:
    given = []
    if outputs.json_schema is not None:
        given.append(("json", _made("json", outputs.json_schema, "structured_outputs.json")))
    for name in ("regex", "choice", "grammar"):
        value = getattr(outputs, name)
        if value is not None:
            given.append((name, _made(name, value, f"structured_outputs.{name}")))
    if outputs.json_object:
        given.append(("json_object", {"response_format": {"type": "json_object"}}))
    if outputs.structural_tag is not None:
        tag: Any = outputs.structural_tag  # Any: what the client wrote
        param = "structured_outputs.structural_tag"
        if isinstance(tag, str):
            tag = parse(tag, param, param=param)
            if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
                raise InvalidRequest(f"{param}: must be an object of type structural_tag", param=param)
        else:
            tag = tag.model_dump(by_alias=True, exclude_none=True)
        given.append(("structural_tag", {"response_format": {**tag, "type": "structural_tag"}}))
    if not given:
        raise InvalidRequest(
            "structured_outputs: asks for nothing; give json, regex, choice, grammar, json_object or "
            "structural_tag",
            param="structured_outputs",
        )
    return given


def _made(name: str, value: Any, param: str) -> dict[str, Any]:
    if name == "choice":
        return {"choice": tuple(value)}
    if name != "json":
        return {name: value}
    if isinstance(value, str):
        value = parse(value, param, param=param)
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{param}: a JSON schema is an object; got {value!r:.60}", param=param)
    return {"json_schema": value}

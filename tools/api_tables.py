"""Writes the parameter tables of docs/api.md from the request schemas: `python -m ostinato.tools.api_tables`.

A table stands between `<!-- fields: NAME -->` and `<!-- end -->` and is replaced. `--check` changes
nothing and fails when the page is not current.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import ostinato
from ostinato.errors import ConfigError
from ostinato.runtime.http.api_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    StreamOptions,
    TokenizeRequest,
)
from ostinato.runtime.http.messages_schema import MessagesRequest
from ostinato.runtime.http.pooling_schema import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from ostinato.runtime.http.responses_schema import ResponsesRequest
from ostinato.runtime.http.wire import IGNORED, UNSUPPORTED, Wire

PAGE = Path(ostinato.__file__).parent / "docs" / "api.md"
_BLOCK = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def field_table(fields: Iterable[tuple[str, FieldInfo]]) -> str:
    """Name, default and rule of each field. ConfigError names a field that says no rule."""
    rows = ["| Field | Default | Rule |", "|---|---|---|"]
    for name, field in fields:
        extra = field.json_schema_extra
        if not field.description or not isinstance(extra, dict):
            raise ConfigError(f"{name}: no rule for docs/api.md; declare it with `optional` or `required`")
        cells = (f"`{name}`", str(extra["x-default"]), field.description)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def own_fields(schema: type[BaseModel], *others: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Fields of a schema that `others` do not have, or have with another rule."""
    theirs = {name: field.description for other in others for name, field in other.model_fields.items()}
    found = schema.model_fields.items()
    return [(name, field) for name, field in found if theirs.get(name, "") != field.description]


def ignored_list() -> str:
    """Names of the fields without effect."""
    taken = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    return (
        ", ".join(f"`{name}`" + (" (completions)" if name in taken else "") for name in sorted(IGNORED))
        + "\n"
    )


def unsupported_list() -> str:
    """The fields that are refused, with the values that are not."""
    taken = ChatRequest.model_fields.keys()
    rows = ["| Field | Accepted besides null |", "|---|---|"]
    for name, accepted in sorted(UNSUPPORTED.items()):
        values = list(dict.fromkeys(f"`{json.dumps(one)}`" for one in accepted if not isinstance(one, float)))
        where = " in completions" if name in taken else ""
        rows.append(f"| `{name}`{where} | {', '.join(values) or 'nothing'} |")
    return "\n".join(rows) + "\n"


def other_fields(schema: type[Wire]) -> str:
    """Fields that a schema does not have: those without effect, and those that are refused."""
    refused = []
    for name, accepted in sorted(schema.unsupported.items()):
        values = " or ".join(f"`{json.dumps(one)}`" for one in accepted)
        refused.append(f"`{name}`" + (f" (but for {values})" if values else ""))
    ignored = ", ".join(f"`{name}`" for name in sorted(schema.ignored))
    return f"Without effect: {ignored}.\n\nRefused unless null: {', '.join(refused)}.\n"


TABLES: dict[str, Callable[[], str]] = {
    "both": lambda: field_table(own_fields(SamplingRequest)),
    "stream_options": lambda: field_table(own_fields(StreamOptions)),
    "chat": lambda: field_table(own_fields(ChatRequest, SamplingRequest)),
    "completions": lambda: field_table(own_fields(CompletionRequest, SamplingRequest)),
    "tokenize": lambda: field_table(own_fields(TokenizeRequest, ChatRequest)),
    "detokenize": lambda: field_table(own_fields(DetokenizeRequest, Wire)),
    "responses": lambda: field_table(own_fields(ResponsesRequest, Wire)),
    "responses_others": lambda: other_fields(ResponsesRequest),
    "pooling": lambda: field_table(own_fields(PoolingRequest, Wire)),
    "pooling_others": lambda: other_fields(PoolingRequest),
    "embeddings": lambda: field_table(own_fields(EmbeddingRequest, PoolingRequest)),
    "score": lambda: field_table(own_fields(ScoreRequest, PoolingRequest)),
    "rerank": lambda: field_table(own_fields(RerankRequest, PoolingRequest)),
    "messages": lambda: field_table(own_fields(MessagesRequest, Wire)),
    "messages_others": lambda: other_fields(MessagesRequest),
    "ignored": ignored_list,
    "unsupported": unsupported_list,
}


def current(page: str) -> str:
    """The page with every table as the schemas have it now. ConfigError: a table that nobody knows."""

    def table(block: re.Match[str]) -> str:
        if block[2] not in TABLES:
            raise ConfigError(f"docs/api.md: no table {block[2]!r}; there are {', '.join(sorted(TABLES))}")
        return block[1] + TABLES[block[2]]() + block[3]

    return _BLOCK.sub(table, page)


def main() -> None:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    made = current(page)
    if made == page:
        return
    if "--check" in sys.argv[1:]:
        sys.exit("docs/api.md is not current; run `python -m ostinato.tools.api_tables`")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()

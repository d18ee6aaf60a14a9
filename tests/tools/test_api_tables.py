"""The parameter tables of docs/api.md are those of the schemas."""

import pytest
from pydantic import BaseModel

from ostinato.errors import ConfigError
from ostinato.runtime.http.api_schema import ChatRequest, CompletionRequest, StreamOptions, TokenizeRequest
from ostinato.tools.api_tables import PAGE, TABLES, current, field_table, own_fields


def test_the_page_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert current(page) == page, "run `python -m ostinato.tools.api_tables`"
    assert all(f"<!-- fields: {name} -->" in page for name in TABLES)


def test_every_field_has_a_row_with_its_rule():
    page = PAGE.read_text(encoding="utf-8")
    for schema in (ChatRequest, CompletionRequest, TokenizeRequest, StreamOptions):
        for name, field in schema.model_fields.items():
            assert f"| `{name}` |" in page, name
            assert field.description.replace("|", "\\|") in page, name


def test_a_field_without_a_rule_is_an_error_that_names_it():
    class Odd(BaseModel):
        odd: int | None = None

    with pytest.raises(ConfigError, match="odd: no rule"):
        field_table(own_fields(Odd))


def test_an_unknown_table_is_an_error():
    with pytest.raises(ConfigError, match="no table 'nothing'; there are both"):
        current("<!-- fields: nothing -->\n<!-- end -->")

"""Chat templates, rendered as the models' authors expect: sandboxed jinja2 with the helpers that templates call.

Environment and helpers follow transformers' `apply_chat_template`, so that a model sees the prompt it was trained on.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Raises ValueError with the line when the template is not valid jinja2."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template does not parse, line {error.lineno}: {error.message}") from error


def render(source: str, **variables: Any) -> str:
    """Raises ValueError with the template's own message when it refuses (e.g. roles that do not alternate)."""
    try:
        return compile_template(source).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused these messages: {error.message or error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"the chat template failed on these messages: {error!r}") from error

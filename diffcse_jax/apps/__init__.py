"""Applications: each one uses the core, and nothing in the core imports them."""

from pathlib import Path
from typing import Any

from diffcse_jax.errors import require_extra

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Render a page from its template; text is escaped.

    Args:
        template: Name of a file in `templates/`.
        values: What the template shows.

    Raises:
        UserError: Jinja is not installed.
    """
    jinja2 = require_extra("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    return environment.get_template(template).render(**values) + "\n"


def _printable(value: Any) -> Any:
    """Replace characters that HTML does not allow: control characters and lone surrogates."""
    if type(value) is not str:  # numbers, and markup that is escaped already
        return value
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_forbidden(character) else character for character in value)


def _is_forbidden(character: str) -> bool:
    is_control = (character < " " and character not in "\t\n\r") or "\x7f" <= character <= "\x9f"
    return is_control or "\ud800" <= character <= "\udfff"

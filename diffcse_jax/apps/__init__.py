"""Applications: each one uses the core, and nothing in the core imports them."""

import re
from pathlib import Path
from typing import Any

from diffcse_jax.errors import require_extra

_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # in HTML


def render(template: str, **values: Any) -> str:
    """Render a page from its template in `templates/`; text is escaped."""
    jinja2 = require_extra("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Other types are numbers, and markup that is escaped already.
        finalize=lambda value: _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value,
    )
    return environment.get_template(template).render(**values) + "\n"

"""Applications: each one uses the core, and nothing in the core imports them."""

from pathlib import Path
from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Render a page from its template in `templates/`; text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values) + "\n"

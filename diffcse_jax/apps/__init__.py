"""Applications: each one uses the core, and nothing in the core imports them."""

from pathlib import Path
from typing import Any

from diffcse_jax.errors import require_extra


def render(template: str, **values: Any) -> str:
    """Render a page from its template in `templates/`; text is escaped."""
    jinja2 = require_extra("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values) + "\n"

"""Errors of the sources of text in the words of a command."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from diffcse_jax.errors import DataError

ALSO_TOLD = {"; set data.pairs, to 'lead' for example": "; copy their text into a txt file"}  # pairs are training's


@contextlib.contextmanager
def told(options: Mapping[str, str]) -> Iterator[None]:
    """Name a command's options in errors instead of those of a configuration."""
    try:
        yield
    except DataError as error:
        message = re.sub(r" \(as in --config\..*\)", "", str(error))
        for key, option in {**ALSO_TOLD, **options}.items():
            message = message.replace(key, option)
        raise type(error)(message) from error

"""Vectors written block by block, as many as come."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Float32


class NpyWriter:
    """A `.npy` file of float32 rows whose number is known only at its end; a context manager.

    Args:
        path: the file.
        dimension: numbers of a row.
    """

    def __init__(self, path: Path, dimension: int):
        self._path, self._dimension, self._rows = path, dimension, 0

    def __enter__(self) -> "NpyWriter":
        self._file: BinaryIO = self._path.open("wb")
        self._write_header()
        return self

    def append(self, rows: Float32[np.ndarray, "rows dimension"]) -> None:
        """Writes further rows."""
        self._file.write(np.ascontiguousarray(rows, np.float32).data)
        self._rows += len(rows)

    def __exit__(self, *exception: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        # The library leaves room for the longest number of rows, so that the header's length is always the same.
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._dimension)}
        )


def read_npy(path: Path, refused: Callable[[str], Exception]) -> Float32[np.ndarray, "rows dimension"]:
    """The rows of a `.npy` file of float32, mapped into memory.

    Args:
        path: the file.
        refused: makes the exception that is raised for a file that is something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise refused(f"{path}: cannot be read ({error})") from error
    if not (isinstance(array, np.ndarray) and array.dtype == np.float32 and array.ndim == 2):
        raise refused(f"{path}: no table of float32 numbers")
    return array

"""Hides PyTorch from a process that has this folder on its path: importing it takes seconds, and few tests need it."""

import importlib.machinery
import sys


class PathFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in ("torch", "sentence_transformers")
        return None if is_hidden else super().find_spec(name, path, target)


sys.meta_path = [
    PathFinder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]

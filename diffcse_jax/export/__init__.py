"""A trained model as a folder of Hugging Face and sentence-transformers, checked, with a model card."""

from diffcse_jax.export.card import About
from diffcse_jax.export.folder import SAMPLES, TOLERANCE, export, write_folder

__all__ = ["SAMPLES", "TOLERANCE", "About", "export", "write_folder"]

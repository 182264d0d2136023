"""Write a trained model as a Hugging Face and sentence-transformers folder, check it, and add a model card."""

from diffcse_jax.export.folder import export

__all__ = ["export"]

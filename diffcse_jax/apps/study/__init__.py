"""Studies: variants of a configuration, each trained with several seeds, in one table. See docs/scaling.md."""

from diffcse_jax.apps.study.plan import Settings, Study, settings_of

__all__ = ["Settings", "Study", "settings_of"]

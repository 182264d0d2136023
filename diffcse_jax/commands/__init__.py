"""The commands `diffcse train`, `diffcse evaluate` and `diffcse study`."""

"""The commands `diffcse train` and `diffcse evaluate`."""

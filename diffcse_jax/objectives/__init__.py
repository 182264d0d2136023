"""Losses as pure functions: arrays in, one value per example out. They know no model; the caller reduces."""

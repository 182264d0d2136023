"""Bytes become text and lines."""

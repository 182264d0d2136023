"""The model card: README.md of an exported folder."""

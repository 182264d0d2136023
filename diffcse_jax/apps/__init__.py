"""Applications: each uses the core, and none imports another."""

"""Files of documents become titled sections."""

EXTRA = "documents"  # the optional dependencies that most formats need

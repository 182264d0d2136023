"""Files of documents become titled sections."""

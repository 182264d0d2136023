"""Files of rows become rows with named columns."""

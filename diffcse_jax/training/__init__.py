"""Networks, losses and data brought together: the train step and the loop around it."""

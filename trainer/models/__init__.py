"""Networks: made, loaded, and packed to travel."""

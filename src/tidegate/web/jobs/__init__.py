"""Jobs as every door makes and watches them."""

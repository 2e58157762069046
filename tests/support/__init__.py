"""What the tests stand on: real servers, real processes and means to break them. Nothing here knows the product."""

"""One HTTP call: connections, time-outs, streams, and every failure sorted into a class."""

"""One HTTP call: connections, time-outs and streams, with every failure sorted into a class."""

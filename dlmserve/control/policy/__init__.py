"""Every decision of the server, as pure state: no clock, no sockets, no threads, no randomness, no torch."""

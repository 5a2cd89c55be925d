"""Pure decisions: no clock, no I/O, no random source."""

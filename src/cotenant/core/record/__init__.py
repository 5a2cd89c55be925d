"""The append-only event log of a run: schema, writer, reader."""

"""The command line: one module per subcommand, without logic of its own."""

"""Plans for changing request rates while the server runs."""

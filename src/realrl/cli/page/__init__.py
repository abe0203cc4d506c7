"""What a plan's page shows, and the templates that draw it."""

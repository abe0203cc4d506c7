"""Content of a plan's page, and the templates that draw it."""

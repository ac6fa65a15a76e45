"""A report of results: sentences, tables and pictures, on the terminal, as Markdown and as an HTML page."""

"""Reports of a run: HTML, Markdown, terminal tables and plots."""

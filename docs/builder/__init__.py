"""Makes the documentation site of the Markdown files in docs/: see docs/build.py."""

"""Files, videos, tables, and the machine."""
